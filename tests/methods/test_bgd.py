"""BGD on calibration data: it keeps a layer's output closer than k-means of the weights does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.solve.moments import MomentsOf, unfolded
from factorpack.weight import Weight
from tests.helpers import assert_same_encoded, relative_error, seeded


def uneven(samples: int, channels: int, *rest: int) -> Tensor:
    """Inputs whose channels differ in scale and correlate with their neighbours."""
    inputs = seeded(samples, channels, *rest, seed=5)
    inputs = inputs + 0.8 * inputs.roll(1, 1)
    scale = torch.logspace(-1.5, 0.5, channels)[
        torch.randperm(channels, generator=torch.Generator().manual_seed(0))
    ]
    return inputs * scale.reshape(1, -1, *[1] * len(rest))


def moments_of(layer: nn.Module, inputs: Tensor) -> LayerMoments:
    running = MomentsOf(layer, 10**6)
    running.add(inputs)
    return running.result()


CASES: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Linear(64, 96, bias=False), uneven(200, 64)),
    "conv": (nn.Conv2d(16, 48, 3, bias=False), uneven(8, 16, 8, 8)),
    "grouped": (nn.Conv2d(16, 48, 3, groups=2, bias=False), uneven(8, 16, 8, 8)),
    "pointwise": (nn.Conv2d(32, 64, 1, bias=False), uneven(8, 32, 6, 6)),
}


def output_error(layer: nn.Module, inputs: Tensor, encoded: Encoded) -> float:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    groups = getattr(layer, "groups", 1)
    seen = unfolded(layer, inputs)
    both = [w.detach().reshape(groups, -1, seen.shape[2]) for w in (decode(encoded), weight)]
    found, expected = (seen @ w.transpose(1, 2) for w in both)
    return relative_error(found, expected)


@pytest.mark.parametrize("case", CASES)
def test_it_keeps_the_output_closer_than_k_means(case: str) -> None:
    layer, inputs = CASES[case]
    weight = seeded(*layer.weight.shape)
    layer.weight.data.copy_(weight)
    moments = moments_of(layer, inputs)
    plain = fp.methods.VQ(16).encode(Weight(weight))
    errors = {
        gram: output_error(layer, inputs, fp.methods.BGD(16, gram=gram).encode(Weight(weight, 0, moments)))
        for gram in ("blocks", "shared")
    }
    assert errors["blocks"] < errors["shared"]
    assert errors["blocks"] < output_error(layer, inputs, plain)
    assert fp.methods.BGD(16).encode(Weight(weight, 0, moments)).note == plain.note == ""


def test_white_inputs_make_it_k_means() -> None:
    """Up to where the two start: both end at codewords that are means."""
    weight, eye = seeded(96, 64), torch.eye(64)[None]
    moments = LayerMoments(eye, torch.zeros(1, 64), None, torch.zeros(1, 64))
    fitted, plain = (
        fp.methods.BGD(16).encode(Weight(weight, 0, moments)),
        fp.methods.VQ(16).encode(Weight(weight)),
    )
    errors = [relative_error(decode(each), weight) for each in (fitted, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=0.03)


def test_without_data_it_is_k_means_and_says_so() -> None:
    weight = seeded(48, 64)
    assert_same_encoded(
        fp.methods.BGD(16, seed=2, iterations=7).encode(Weight(weight)),
        fp.methods.VQ(16, seed=2, iterations=7)
        .encode(Weight(weight))
        .noted("plain k-means: no calibration data"),
    )


def test_tiles_that_do_not_divide_a_filter_have_no_block_of_inputs() -> None:
    weight = seeded(48, 10)
    encoded = fp.methods.BGD(8).encode(Weight(weight, 0, moments_of(nn.Linear(10, 48), seeded(50, 10))))
    assert encoded.note == "plain k-means: 4 does not divide a filter"
    assert encoded.kind == "codewords"


def test_a_sample_in_the_place_of_moments() -> None:
    sample = LayerSample(seeded(4, 8), seeded(4, 6), lambda weight, inputs: inputs @ weight.T)
    with pytest.raises(PlanError, match="BGD takes moments of a layer's inputs, not a sample of them"):
        fp.methods.BGD(8).encode(Weight(seeded(6, 8), 0, sample))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.body = nn.Conv2d(16, 32, 3)
        self.head = nn.Linear(32, 40)
        for index, parameter in enumerate(self.parameters()):
            parameter.data.copy_(0.2 * seeded(*parameter.shape, seed=index))

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(self.stem(images).relu()).relu()
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_a_whole_model_on_its_inputs() -> None:
    images = seeded(32, 3, 10, 10)
    packed = fp.compress(Net(), fp.methods.BGD(32), calibration=[images], progress=False)
    kinds = {name: packed[name].kind for name in packed if name.endswith("weight")}
    assert kinds == {"stem.weight": "keep", "body.weight": "codewords", "head.weight": "codewords"}
    plain = fp.compress(Net(), fp.methods.VQ(32), progress=False)
    answer = Net()(images).detach()
    errors = [relative_error(each.load_into(Net())(images).detach(), answer) for each in (packed, plain)]
    assert errors[0] < errors[1]
    assert packed["head.weight"].note == "classifier; 80 codewords, not 2048: there are only 320 tiles"
