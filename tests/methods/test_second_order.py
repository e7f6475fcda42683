"""SecondOrder: codes of one step or of fixed width that keep a layer's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.calibration.calibrate import calibrate
from factorpack.decoding import decode
from factorpack.errors import PlanError, WeightError
from factorpack.format.streams import coded_bytes
from factorpack.methods import METHODS, from_fields
from factorpack.quantize.uniform import fit_scale, storable
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.solve.moments import MomentAccumulator, unfold_inputs
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_encoded, assert_same_tensor, relative_error, seeded


def correlated(*shape: int, seed: int = 0) -> Tensor:
    """Inputs whose neighbours, and whose channels, are alike."""
    noise = seeded(*shape, seed=seed)
    for axis in range(1, len(shape)):
        noise = noise + noise.roll(1, axis) + 0.7 * noise.roll(2, axis)
    return noise


def moments_of(layer: nn.Module, inputs: Tensor, original: Tensor | None = None) -> LayerMoments:
    running = MomentAccumulator(layer, 1 << 30)
    running.add(inputs, original)
    return running.result()


def output_error(layer: nn.Module, encoded: Encoded, inputs: Tensor) -> float:
    """The output error with the decoded weight, relative to the outputs without a bias."""
    u = unfold_inputs(layer, inputs)
    weight = layer.weight.detach()
    assert isinstance(weight, Tensor)
    split = (len(u), -1, u.shape[2])
    wanted, found = (u @ w.reshape(split).transpose(1, 2) for w in (weight, decode(encoded)))
    return relative_error(found, wanted)


def seeded_layer(layer: nn.Module, seed: int = 9) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(seeded(*parameter.shape, seed=seed))
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(36, 20), (800, 36)),
    "convolution": (lambda: nn.Conv2d(8, 12, 3, padding=1), (6, 8, 12, 12)),
    "grouped": (lambda: nn.Conv2d(8, 12, 3, groups=2), (6, 8, 12, 12)),
    "depthwise": (lambda: nn.Conv2d(12, 12, 3, groups=12), (6, 12, 12, 12)),
}


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outputs_are_closer_than_rounding_to_nearest_leaves_them(case: str, bits: int) -> None:
    make, shape = LAYERS[case]
    layer, inputs = seeded_layer(make()), correlated(*shape)
    weight = layer.weight.detach()
    encoded = fp.SecondOrder(bits=bits).encode(Weight(weight, 0, moments_of(layer, inputs)))
    plain = fp.Scalar(bits).encode(Weight(weight))
    assert encoded.bits == plain.bits == {"codes": bits}
    assert_same_tensor(encoded.parts["scale"], plain.parts["scale"])
    assert output_error(layer, encoded, inputs) < 0.9 * output_error(layer, plain, inputs)


@pytest.mark.parametrize("tile", [1, 9])
@pytest.mark.parametrize("case", LAYERS)
def test_one_step_keeps_outputs_better_than_weights_alone_tell(case: str, tile: int) -> None:
    """Against the same step without moments: feedback must lower the outputs' error."""
    make, shape = LAYERS[case]
    layer, inputs = seeded_layer(make()), correlated(*shape)
    weight = layer.weight.detach()
    method = fp.SecondOrder(step=0.5, tile=tile, price=0.0)
    encoded = method.encode(Weight(weight, 0, moments_of(layer, inputs)))
    alone = method.encode(Weight(weight))
    assert encoded.kind == ("scalar" if tile == 1 else "factors")
    assert output_error(layer, encoded, inputs) < 0.8 * output_error(layer, alone, inputs)


def test_the_step_is_the_one_asked_for() -> None:
    weight = seeded(10, 16)
    encoded = fp.SecondOrder(step=0.1, price=0.0).encode(Weight(weight))
    step = storable(torch.tensor([[0.1]]))
    assert_same_tensor(encoded.parts["scale"], step)
    assert torch.equal(encoded.parts["codes"].float(), (weight / step.float()).round())


def test_without_moments_fixed_width_is_rounding_to_nearest() -> None:
    weight = seeded(10, 4, 3, 3)
    assert_same_encoded(fp.SecondOrder(bits=4).encode(Weight(weight)), fp.Scalar(4).encode(Weight(weight)))


def test_codes_are_as_wide_as_they_come_out() -> None:
    weight = seeded(10, 16)
    for step, dtype in ((0.5, torch.int8), (0.001, torch.int16)):
        encoded = fp.SecondOrder(step=step, price=0.0).encode(Weight(weight))
        largest = int(encoded.parts["codes"].abs().max())
        assert encoded.bits["codes"] == largest.bit_length() + 1
        assert encoded.parts["codes"].dtype == dtype
        assert (decode(encoded) - weight).abs().max() <= 0.51 * step + 1e-3 * step * largest


def test_a_step_too_fine_for_any_code_is_an_error() -> None:
    """Codes beyond 16 bits cannot be stored, and a clipped weight is another weight."""
    with pytest.raises(
        PlanError, match=r"at step 1e-06 codes go up to .*, expected a step at which 16 bits do"
    ):
        fp.SecondOrder(step=1e-6).encode(Weight(seeded(10, 16)))


@pytest.mark.parametrize("tile", [1, 4, 9])
def test_a_fine_step_gives_the_weight_back(tile: int) -> None:
    layer = seeded_layer(nn.Conv2d(4, 6, 3))
    weight = layer.weight.detach()
    moments = moments_of(layer, correlated(4, 4, 9, 9))
    encoded = fp.SecondOrder(step=0.004, tile=tile).encode(Weight(weight, 0, moments))
    assert relative_error(decode(encoded), weight) < 0.02


def test_a_tile_that_does_not_divide_a_filter() -> None:
    weight = seeded(8, 10)
    encoded = fp.SecondOrder(step=0.2, tile=4).encode(Weight(weight))
    assert encoded.note == "no basis: 4 does not divide the 10 weights of a filter"
    plain = fp.SecondOrder(step=0.2).encode(Weight(weight))
    assert plain.note == ""
    assert torch.equal(decode(encoded), decode(plain))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("method", [fp.SecondOrder(step=0.02, tile=4), fp.SecondOrder(bits=8)])
def test_transposed_convolutions(groups: int, method: fp.SecondOrder) -> None:
    """Rows are output channels: a loud one does not coarsen the others."""
    weight = seeded(8, 6, 2, 2)
    rows = Weight(weight, groups).rows()
    assert rows.shape == (6 * groups, 8 // groups * 4)
    encoded = method.encode(Weight(weight, groups))
    assert encoded.transposed_groups == groups
    assert relative_error(decode(encoded), weight) < 0.02
    if method.bits:
        assert_same_tensor(encoded.parts["scale"], fit_scale(rows, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    layer = seeded_layer(nn.Linear(12, 8))
    moments = moments_of(layer, correlated(300, 12))
    weight = layer.weight.detach().to(dtype)
    for method in (fp.SecondOrder(step=0.02), fp.SecondOrder(bits=8), fp.SecondOrder(step=0.02, tile=4)):
        decoded = decode(method.encode(Weight(weight, 0, moments)))
        assert decoded.dtype == dtype
        assert relative_error(decoded, weight) < 0.03


def test_changed_inputs_are_made_up_for() -> None:
    """The weight gives way to inputs that an earlier layer's compression has turned."""
    layer = seeded_layer(nn.Linear(12, 8))
    weight = layer.weight.detach()
    original = correlated(900, 12)
    inputs = original @ (torch.eye(12) + 0.1 * seeded(12, 12, seed=5))
    wanted = original @ weight.T
    method = fp.SecondOrder(step=0.05, damping=1e-4)
    aware = decode(method.encode(Weight(weight, 0, moments_of(layer, inputs, original))))
    blind = decode(method.encode(Weight(weight, 0, moments_of(layer, inputs))))
    assert relative_error(inputs @ aware.T, wanted) < 0.2 * relative_error(inputs @ blind.T, wanted)


# -- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "step is None and bits None: give exactly one of them"),
        ({"step": 0.1, "bits": 3}, "step is 0.1 and bits 3: give exactly one of them"),
        ({"bits": 1}, "bits is 1, allowed are 2 to 8"),
        ({"bits": 9}, "bits is 9, allowed are 2 to 8"),
        ({"bits": 3.0}, "bits is 3.0, a float; expected int"),
        ({"bits": True}, "bits is True, a bool; expected int"),
        ({"step": "0.1"}, "step is '0.1', a str; expected float or int"),
        ({"step": 0}, "step is 0, expected a number above 0"),
        ({"step": -0.5}, "step is -0.5, expected a number above 0"),
        ({"step": float("nan")}, "step is nan, expected a number above 0"),
        ({"step": float("inf")}, "step is inf, expected a number above 0"),
        ({"step": 0.1, "tile": 0}, "tile 0, .* expected from 1 up"),
        ({"step": 0.1, "tile": 2.0}, "tile is 2.0, a float; expected int"),
        ({"step": 0.1, "samples": -1}, "samples -1, "),
        ({"step": 0.1, "price": -0.1}, "price -0.1, "),
        ({"step": 0.1, "price": float("nan")}, "price nan, "),
        ({"step": 0.1, "damping": 0}, "damping 0: "),
        ({"step": 0.1, "damping": float("inf")}, "damping inf: "),
        ({"step": 0.1, "trellis": 16}, "trellis is 16, allowed are 0 and 4 and 8 states"),
        ({"step": 0.1, "trellis": True}, "trellis is True, a bool; expected int"),
        ({"bits": 3, "trellis": 8}, "bits is 3: a trellis of 8 states is for codes of one step"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fp.SecondOrder(**settings)


@pytest.mark.parametrize("tile", [1, 9])
@pytest.mark.parametrize("states", [4, 8])
def test_a_trellis_takes_fewer_bytes_at_the_same_output_error(states: int, tile: int) -> None:
    """Half a bit per weight is worth a factor of two in squared error."""
    layer, inputs = seeded_layer(nn.Conv2d(16, 128, 3)), correlated(4, 16, 12, 12)
    weight, moments = layer.weight.detach(), moments_of(layer, inputs)
    plain = fp.SecondOrder(step=0.5, tile=tile).encode(Weight(weight, 0, moments))
    path = fp.SecondOrder(step=0.5, tile=tile, trellis=states).encode(Weight(weight, 0, moments))
    assert (plain.trellis, path.trellis) == (0, states)
    worse = output_error(layer, path, inputs) / output_error(layer, plain, inputs)
    fair = coded_bytes(plain) - math.log2(worse) * weight.numel() / 8
    assert coded_bytes(path) < 0.99 * fair


@pytest.mark.parametrize("shape", [(1, 300), (2, 2), (15, 40)])
def test_few_rows_have_plain_codes(shape: tuple[int, int]) -> None:
    encoded = fp.SecondOrder(step=0.3, trellis=8).encode(Weight(seeded(*shape)))
    assert_same_encoded(encoded, fp.SecondOrder(step=0.3).encode(Weight(seeded(*shape))))


def test_settings_from_a_recipe() -> None:
    found = from_fields(METHODS, {"method": "second_order", "step": 1, "tile": 9})
    assert found == fp.SecondOrder(step=1, tile=9)


def test_a_sample_is_not_what_it_takes() -> None:
    sample = LayerSample(seeded(2, 4), seeded(2, 3), lambda weight, values: values @ weight.T)
    with pytest.raises(PlanError, match="takes moments of a layer's inputs, not a sample"):
        fp.SecondOrder(bits=4).encode(Weight(seeded(3, 4), 0, sample))


@pytest.mark.parametrize("weight", [torch.tensor(1.0), seeded(5)])
def test_vectors_have_no_inputs(weight: Tensor) -> None:
    with pytest.raises(PlanError, match="two dimensions or more"):
        fp.SecondOrder(bits=4).encode(Weight(weight))


def test_weights_no_code_can_stand_for() -> None:
    with pytest.raises(WeightError, match="1 of 4 weights are NaN or infinite"):
        fp.SecondOrder(bits=4).encode(Weight(torch.tensor([[1.0, torch.nan], [1.0, 0.0]])))


# -- whole models ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 16, 2, groups=2)
        self.last = nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 10)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(seeded(*parameter.shape, seed=index) * 0.2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.up(self.body(self.stem(images).relu()).relu()).relu()
        return self.head(self.last(x).mean((2, 3)))  # type: ignore[no-any-return]


IMAGES = correlated(24, 3, 10, 10)


@pytest.mark.parametrize("method", [fp.SecondOrder(bits=3), fp.SecondOrder(step=0.05, tile=9)])
@pytest.mark.parametrize("sequential", [True, False])
def test_through_compress_and_a_file(method: fp.SecondOrder, sequential: bool, tmp_path: Path) -> None:
    net = Net()
    packed = fp.compress(
        net, method, calibration=[IMAGES[:16], IMAGES[16:]], sequential=sequential, progress=False
    )
    assert packed["body.weight"].kind == ("scalar" if method.bits else "factors")
    assert packed["up.weight"].transposed_groups == 2
    path = tmp_path / "net.packed.safetensors"
    fp.save(packed, path)
    loaded = fp.load(path)
    for name in packed:
        assert_same_encoded(loaded[name], packed[name])
    state = packed.state_dict()
    for name, values in loaded.state_dict().items():
        assert_same_tensor(values, state[name])


@pytest.mark.parametrize("sequential", [True, False])
def test_layers_are_given_the_moments_they_should_be(sequential: bool) -> None:
    net = Net().eval()
    method = fp.SecondOrder(bits=3)
    packed = fp.compress(net, method, calibration=[IMAGES], sequential=sequential, progress=False)
    calibration = calibrate(net, [IMAGES])
    before = Net().eval()
    for name in ("stem.weight", "body.weight", "up.weight"):
        before.get_parameter(name).data.copy_(decode(packed[name]))
    moments = calibration.moments(["last"], net, before if sequential else None)["last"]
    assert (moments.cross is not None) == sequential
    expected = method.encode(Weight(net.last.weight.detach(), 0, moments))
    assert torch.equal(packed["last.weight"].parts["codes"], expected.parts["codes"])


def test_moments_give_better_answers_than_none() -> None:
    net = Net().eval()
    errors = []
    for method in (fp.SecondOrder(bits=3), fp.Scalar(3)):
        layers = dict.fromkeys(("stem.weight", "up.weight", "head.weight"), fp.Keep())
        packed = fp.compress(net, method, layers=layers, calibration=[IMAGES], progress=False)
        compressed = packed.load_into(Net().eval())
        with torch.no_grad():
            errors.append(relative_error(compressed(IMAGES), net(IMAGES)))
    assert errors[0] < 0.7 * errors[1]


def test_the_latents_of_a_kernel_s_basis_decode_by_hand() -> None:
    layer = seeded_layer(nn.Conv2d(4, 6, 3))
    encoded = fp.SecondOrder(step=0.1, tile=9).encode(
        Weight(layer.weight.detach(), 0, moments_of(layer, correlated(4, 4, 9, 9)))
    )
    parts = encoded.parts
    codebook = parts["codebook"].double() * parts["codebook_scale"].double()
    latent = parts["latent"].double() * parts["latent_scale"].double()
    assert_close(decode(encoded), (codebook @ latent).T.reshape(6, 4, 3, 3))


# -- rows that do not count the same -----------------------------------------------------------------


def test_rows_that_count_more_have_finer_steps() -> None:
    """Weights of 16 apart: steps four times apart, and so are the errors; the sum that counts is the least."""
    layer, inputs = seeded_layer(nn.Linear(36, 200)), seeded(800, 36)
    weights = torch.cat([torch.full((100,), 4.0), torch.full((100,), 0.25)])
    moments = replace(moments_of(layer, inputs), row_weights=weights)
    method = fp.SecondOrder(step=0.2, tile=9, price=0.0)
    encoded = method.encode(Weight(layer.weight.detach(), 0, moments))
    assert encoded.kind == "scalar"  # a basis has one step for all rows
    steps = encoded.parts["scale"].float().flatten()
    assert_close(steps[100:] / steps[:100], torch.full((100,), 4.0))
    error = (decode(encoded) - layer.weight.detach()).square().mean(1)
    assert 12 < float(error[100:].mean() / error[:100].mean()) < 20


def test_rows_that_count_differently_adapt_to_changed_inputs_alike() -> None:
    """At a fine step the weight is the adapted one, whatever its rows were divided by."""
    layer, original = seeded_layer(nn.Linear(36, 20)), seeded(800, 36)
    moments = moments_of(layer, original + 0.5 * seeded(800, 36, seed=1), original)
    alike, unlike = (
        decode(fp.SecondOrder(step=1e-3, price=0.0).encode(Weight(layer.weight.detach(), 0, each)))
        for each in (moments, replace(moments, row_weights=torch.linspace(0.5, 2.0, 20)))
    )
    assert relative_error(unlike, alike) < 1e-3 < relative_error(alike, layer.weight.detach())


def test_a_ridge_is_a_number_above_zero() -> None:
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(PlanError, match="ridge is"):
            fp.SecondOrder(step=0.1, ridge=wrong)


@pytest.mark.parametrize("reorder", [True, False])
def test_columns_of_linear_layers_alone_are_put_in_order(reorder: bool) -> None:
    for layer, inputs in (
        (nn.Linear(12, 20), correlated(300, 12)),
        (nn.Conv2d(12, 20, 1), correlated(30, 12, 4, 4)),
    ):
        weight = layer.weight.detach()
        assert isinstance(weight, Tensor)
        moments = moments_of(layer, inputs)
        order = fp.SecondOrder(step=0.1, tile=1, reorder=reorder).problem(Weight(weight, 0, moments)).order
        assert order is not None
        assert torch.equal(order, torch.arange(12)) == (not reorder or isinstance(layer, nn.Conv2d))
