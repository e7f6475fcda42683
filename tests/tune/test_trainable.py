"""The packed form as something to train: what training sees is what the file will hold."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack import methods
from factorpack.decoding import decode
from factorpack.format.streams import coded_bytes
from factorpack.kinds.codewords import codeword_indices
from factorpack.quantize.uniform import code_range, from_codes
from factorpack.record import Encoded
from factorpack.tune.packed_model import PackedModel
from factorpack.tune.trainable import (
    TRAINABLE,
    QuantizedRows,
    TrainableCodewords,
    TrainableFactors,
    TrainableScalar,
)
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_encoded, assert_same_tensor, seeded

WEIGHT = seeded(48, 20)
CONV = seeded(16, 6, 3, 3)  # as (in, out / groups, ...) of a transposed convolution
ZEROS = torch.cat([torch.zeros(3, 20), seeded(45, 20)])


def unsigned(encoded: Encoded) -> Encoded:
    """Scales of minus zero as zero: a scale that learns has no such sign to keep."""
    parts = {name: part if name in encoded.bits else part + 0.0 for name, part in encoded.parts.items()}
    return replace(encoded, parts=parts)


FACTORS = {
    "one scale per row": fp.QSPCA(9, 4, tile=16).encode(Weight(WEIGHT)),
    "one scale per column": fp.QSPCA(9, 4, tile=16, latent_scales="column").encode(Weight(WEIGHT)),
    "no mean": fp.QSPCA(9, 3, tile=16, center=False).encode(Weight(WEIGHT)),
    "sparse": fp.QSPCA(9, 4, 0.3, tile=16).encode(Weight(WEIGHT)),
    "sparse, a scale a column": fp.QSPCA(9, 4, 0.3, tile=16, latent_scales="column").encode(Weight(WEIGHT)),
    "two bits": fp.QSPCA(9, 2, tile=16, codebook_bits=2).encode(Weight(WEIGHT)),
    "eight bits": fp.QSPCA(6, 8, tile=16, codebook_bits=8).encode(Weight(WEIGHT)),
    "transposed": fp.QSPCA(9, 4, tile=16).encode(Weight(CONV, transposed_groups=2)),
    "a last tile that is filled up": fp.QSPCA(9, 4, tile=16).encode(Weight(seeded(47, 19))),
    "tiny": fp.QSPCA(9, 4, tile=16).encode(Weight(WEIGHT * 1e-16)),
    "huge": fp.QSPCA(9, 4, tile=16).encode(Weight(WEIGHT * 1e16)),
    "zeros": fp.QSPCA(9, 4, 0.1, tile=16).encode(Weight(torch.zeros(48, 20))),
    "half": fp.QSPCA(9, 4, tile=16).encode(Weight(WEIGHT.half())),
}
SCALARS = {
    "scalar": fp.Scalar(4).encode(Weight(WEIGHT)),
    "two bits": fp.Scalar(2).encode(Weight(WEIGHT)),
    "eight bits": fp.Scalar(8).encode(Weight(WEIGHT)),
    "transposed": fp.Scalar(4).encode(Weight(CONV, transposed_groups=2)),
    "transposed, one group": fp.Scalar(4).encode(Weight(CONV, transposed_groups=1)),
    "channels of zeros": unsigned(fp.Scalar(4).encode(Weight(ZEROS))),
    "tiny": fp.Scalar(4).encode(Weight(WEIGHT * 1e-30)),
    "noted": fp.Scalar(4).encode(Weight(WEIGHT)).noted("classifier"),
}


def one_scale(encoded: Encoded, part: str) -> Encoded:
    """With the first of its scales for all its rows."""
    return replace(encoded, parts={**encoded.parts, part: encoded.parts[part][:1, :1].contiguous()})


FACTORS["one scale"] = one_scale(fp.QSPCA(9, 4, tile=16).encode(Weight(WEIGHT)), "latent_scale")
SCALARS["one scale"] = one_scale(fp.Scalar(4).encode(Weight(WEIGHT)), "scale")
SCALARS["twelve bits"] = Encoded(
    "scalar",
    (48, 20),
    torch.float32,
    {"codes": (500 * WEIGHT).round().to(torch.int16), "scale": torch.full((48, 1), 2.0**-9).half()},
    {"codes": 12},
)
SCALARS["pruned"] = methods.Prune(0.6, 4).encode(Weight(WEIGHT))
LEVELS = {
    "signs": methods.LSQ(1).encode(Weight(WEIGHT)),
    "ternary": methods.TTQ(0.3).encode(Weight(WEIGHT)),
    "ternary, a level of each sign unused": methods.TTQ(0.3, channels=True).encode(
        Weight(WEIGHT.abs().cumprod(0))
    ),
    "six levels": methods.ABCNet(5).encode(Weight(WEIGHT)),
    "levels of each channel": methods.ABCNet(3, channels=True).encode(Weight(WEIGHT)),
    "transposed": methods.TTQ(channels=True).encode(Weight(CONV, transposed_groups=2)),
    "channels of zeros": methods.TTQ(channels=True).encode(Weight(ZEROS)),
    "tiny": methods.ABCNet(4).encode(Weight(WEIGHT * 1e-30)),
    "huge": methods.ABCNet(4).encode(Weight(WEIGHT * 1e30)),
}
CODEWORDS = {
    "one stage": fp.methods.VQ(16).encode(Weight(WEIGHT)),
    "two stages": fp.methods.AQ(2, 8).encode(Weight(WEIGHT)),
    "transposed": fp.methods.VQ(16).encode(Weight(CONV, transposed_groups=2)),
    "a last tile that is filled up": fp.methods.VQ(16, tile=7).encode(Weight(WEIGHT)),
    "tiny": fp.methods.VQ(16).encode(Weight(WEIGHT * 1e-30)),
    "huge": fp.methods.AQ(2, 8).encode(Weight(WEIGHT * 1e30)),
    "zeros": fp.methods.VQ(16).encode(Weight(torch.zeros(48, 20))),
}
CASES = {f"factors, {name}": each for name, each in FACTORS.items()}
CASES |= {f"scalar, {name}": each for name, each in SCALARS.items()}
CASES |= {f"codewords, {name}": each for name, each in CODEWORDS.items()}


HALF_SCALES = [
    name
    for name, each in CASES.items()
    if any(
        each.parts[scale].dtype == torch.float16 for scale in ("scale", "latent_scale") if scale in each.parts
    )
]
CASES |= {f"levels, {name}": each for name, each in LEVELS.items()}


def test_the_cases_are_what_they_say() -> None:
    assert all(each.kind == "factors" for each in FACTORS.values())
    assert all(each.kind == "codewords" for each in CODEWORDS.values())
    assert {each.parts["codebook"].dtype for each in CODEWORDS.values()} == {torch.float16, torch.float32}
    assert FACTORS["tiny"].parts["latent_scale"].dtype == torch.float32
    assert FACTORS["tiny"].parts["latent"].any()
    assert SCALARS["tiny"].parts["codes"].any()
    assert (SCALARS["channels of zeros"].parts["scale"] == 0).any()
    assert all(each.kind == "levels" for each in LEVELS.values())
    assert LEVELS["tiny"].parts["levels"].dtype == LEVELS["huge"].parts["levels"].dtype == torch.float32


@pytest.mark.parametrize("case", CASES)
def test_untrained_it_is_stored_as_it_was(case: str) -> None:
    encoded = CASES[case]
    assert_same_encoded(TRAINABLE[encoded.kind](encoded).encoded(), encoded)


@pytest.mark.parametrize("case", CASES)
def test_its_weight_is_the_decoded_one(case: str) -> None:
    encoded = CASES[case]
    trainable = TRAINABLE[encoded.kind](encoded)
    weight = trainable().detach()
    if isinstance(trainable, TrainableFactors):
        parts = encoded.parts
        assert_same_tensor(
            trainable.codebook().detach(), from_codes(parts["codebook"], parts["codebook_scale"])
        )
        assert_same_tensor(trainable.latent().detach(), from_codes(parts["latent"], parts["latent_scale"]))
        assert_close(weight, decode(encoded))  # up to the order of a matrix product's sums
    else:
        assert_same_tensor(weight, decode(encoded))


@pytest.mark.parametrize("case", CASES)
def test_what_training_sees_stays_what_is_stored(case: str) -> None:
    """Wherever training takes the numbers and the scales."""
    encoded = CASES[case]
    trainable = TRAINABLE[encoded.kind](encoded)
    with torch.no_grad():
        for index, parameter in enumerate(trainable.parameters()):
            parameter.mul_(1 + 0.3 * seeded(*parameter.shape, seed=index))
            parameter.add_(0.1 * seeded(*parameter.shape, seed=100 + index))
    stored = trainable.encoded()
    assert [part.dtype for part in stored.parts.values()] == [part.dtype for part in encoded.parts.values()]
    if isinstance(trainable, TrainableFactors):
        latent = from_codes(stored.parts["latent"], stored.parts["latent_scale"])
        assert torch.equal(trainable.latent(), latent)  # a masked number may be minus zero
        assert_close(trainable().detach(), decode(stored))
    else:
        assert torch.equal(trainable(), decode(stored))
    assert_same_encoded(TRAINABLE[encoded.kind](stored).encoded(), stored)


@pytest.mark.parametrize("shared", ["row", "column"])
def test_gradients_are_the_learned_steps_in_relative_units(shared: str) -> None:
    """Learned-step quantization's gradients, by the chain rule of x = n 32 s_0 and s = s_0 exp(g)."""
    bits, high = 3, code_range(3)[1]
    codes = torch.randint(-4, 4, (6, 10), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    first = seeded(*((6, 1) if shared == "row" else (1, 10))).abs().half()
    rows = QuantizedRows(codes, first, bits)
    with torch.no_grad():
        rows.numbers.add_(0.03 * seeded(6, 10, seed=1))
        rows.growth.add_(0.1 * seeded(*first.shape, seed=3))
    arriving = seeded(6, 10, seed=2)
    rows().backward(arriving)
    learned = first.double() * rows.growth.detach().double().exp()
    unit = rows.numbers.detach().double() * 32 * first.double() / learned.half().double()
    inside = (unit >= -high - 1) & (unit <= high)
    assert not inside.all()
    slope = unit.round().clamp(-high - 1, high) - unit * inside
    to_scale = (arriving * slope).sum(1 if shared == "row" else 0, keepdim=True)
    assert rows.growth.grad is not None
    assert rows.numbers.grad is not None
    assert_close(rows.growth.grad, to_scale * learned)
    assert_close(rows.numbers.grad, arriving * inside * 32 * first.double())


@pytest.mark.parametrize("case", HALF_SCALES)
def test_adam_s_first_step_moves_no_scale(case: str) -> None:
    """Every number is its code then and has no say in the scale; rounding noise would be a whole step.

    A code times an FP16 scale is exact in FP32.
    """
    encoded = CASES[case]
    trainable = TRAINABLE[encoded.kind](encoded)
    optimizer = torch.optim.Adam(trainable.parameters(), lr=0.1)
    trainable().backward(seeded(*encoded.shape))
    optimizer.step()
    growths = [each for name, each in trainable.named_parameters() if name.endswith("growth")]
    assert len(growths) == len(encoded.bits)
    assert not any(growth.any() for growth in growths)
    assert case == "factors, zeros" or not torch.equal(trainable(), decode(encoded))


@pytest.mark.parametrize("case", ["one stage", "two stages", "transposed"])
def test_a_codeword_s_gradient_is_the_sum_of_its_tiles(case: str) -> None:
    """In units of `unit`; those of all codewords of a stage sum to that of all tiles."""
    encoded = CODEWORDS[case]
    trainable = TrainableCodewords(encoded)
    arriving = seeded(*encoded.shape, seed=2)
    trainable().backward(arriving)
    indices = codeword_indices(encoded)
    tile = encoded.parts["codebook"].shape[1]
    tiles = encoded.layout.to_tiles(arriving, tile).T
    expected = torch.zeros(len(encoded.parts["codebook"]), tile)
    for stage in indices.tolist():
        for index, gradient in zip(stage, tiles, strict=True):
            expected[index] += gradient
    assert trainable.numbers.grad is not None
    assert_close(trainable.numbers.grad, expected * trainable.unit)


def test_training_moves_codewords_and_no_index() -> None:
    encoded = CODEWORDS["two stages"]
    trainable = TrainableCodewords(encoded)
    assert [name for name, _ in trainable.named_parameters()] == ["numbers"]
    optimizer = torch.optim.Adam(trainable.parameters(), lr=3e-4)
    goal = 1.3 * WEIGHT
    errors = []
    for _ in range(300):
        error = (trainable() - goal).square().mean()
        errors.append(error.item())
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    after = trainable.encoded()
    moved = decode(encoded) * 1.3  # what the same indices can do at the least
    assert errors[-1] < 1.01 * (moved - goal).square().mean().item() < errors[0]
    assert_same_tensor(after.parts["indices"], encoded.parts["indices"])
    assert not torch.equal(after.parts["codebook"], encoded.parts["codebook"])
    assert_same_tensor(decode(after), trainable().detach())


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
def test_one_rate_moves_codewords_of_any_spread_alike(factor: float) -> None:
    encoded = fp.methods.VQ(16).encode(Weight(WEIGHT * factor))
    trainable = TrainableCodewords(encoded)
    before = encoded.parts["codebook"].float()
    optimizer = torch.optim.Adam(trainable.parameters(), lr=3e-4, eps=0.0)
    trainable().backward(seeded(48, 20, seed=2) / factor)
    optimizer.step()
    step = (trainable.numbers.detach() * trainable.unit - before).abs() / factor
    spread = (before / factor).square().mean().sqrt()
    assert_close(step, torch.full_like(step, 3e-4 * trainable.unit / factor), torch.float16)
    assert 0.5**0.5 <= trainable.unit / factor / (16 * spread) <= 2**0.5


def test_codewords_stop_at_what_their_type_holds() -> None:
    trainable = TrainableCodewords(CODEWORDS["one stage"])
    with torch.no_grad():
        trainable.numbers.mul_(1e9)
    assert trainable().abs().max() == 65504
    assert_same_tensor(trainable().detach(), decode(trainable.encoded()))


def shaken(trainable: TrainableFactors | TrainableScalar, steps: int = 3) -> Encoded:
    """After steps against random gradients, large enough to reach every code."""
    optimizer = torch.optim.SGD(trainable.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        trainable().backward(seeded(*trainable.like.shape, seed=step))
        with torch.no_grad():
            for parameter in trainable.parameters():
                if parameter.grad is not None and parameter.shape[0] > 1:
                    parameter.add_(parameter.abs().max() * seeded(*parameter.shape, seed=step))
        optimizer.step()
    return trainable.encoded()


@pytest.mark.parametrize("case", ["sparse", "sparse, a scale a column"])
def test_zeros_stay_where_a_threshold_made_some(case: str) -> None:
    encoded = FACTORS[case]
    assert encoded.extra_zeros > 0
    zeros = encoded.parts["latent"] == 0
    after = shaken(TrainableFactors(encoded))
    assert not after.parts["latent"][zeros].any()
    assert not torch.equal(after.parts["latent"], encoded.parts["latent"])
    assert (after.parts["codebook"][encoded.parts["codebook"] == 0] != 0).any()
    assert after.extra_zeros == encoded.extra_zeros


@pytest.mark.parametrize("case", ["one scale per row", "one scale per column", "no mean"])
def test_accidental_zeros_may_leave_where_there_was_no_threshold(case: str) -> None:
    encoded = FACTORS[case]
    assert encoded.extra_zeros == 0
    zeros = encoded.parts["latent"] == 0
    assert zeros.any()
    assert shaken(TrainableFactors(encoded)).parts["latent"][zeros].any()


@pytest.mark.parametrize("tile", [1, 9])
def test_codes_on_a_path_become_plain_codes_of_as_many_bits(tile: int) -> None:
    weight = Weight(seeded(64, 32, 3, 3))
    encoded = fp.SecondOrder(step=0.3, tile=tile, trellis=8).encode(weight)
    assert encoded.trellis == 8
    start = TRAINABLE[encoded.kind](encoded).encoded()
    assert start.trellis == 0
    assert coded_bytes(start) == pytest.approx(coded_bytes(encoded), rel=0.1)
    lost = (decode(start) - weight.values).square().mean() / (decode(encoded) - weight.values).square().mean()
    assert 1 < lost < 3
    assert_same_encoded(TRAINABLE[encoded.kind](encoded, True).encoded(), encoded)


def test_a_scale_that_shrinks_to_nothing_gives_zeros() -> None:
    rows = QuantizedRows(torch.tensor([[1, 2]], dtype=torch.int8), torch.tensor([[0.5]]).half(), 3)
    with torch.no_grad():
        rows.growth.fill_(-40.0)
    rows().sum().backward()
    assert rows().tolist() == [[0.0, 0.0]]
    assert rows.codes().tolist() == [[0, 0]]
    assert rows.scales().tolist() == [[0.0]]
    assert all(each.grad is not None and each.grad.isfinite().all() for each in rows.parameters())


# -- a whole model -----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.body = nn.Conv2d(16, 16, 3, groups=2)
        self.up = nn.ConvTranspose2d(16, 8, 2)
        self.head = nn.Linear(8, 10)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(seeded(*parameter.shape, seed=index) * 0.3)
            self.norm.running_mean = seeded(16, seed=90)
            self.norm.running_var = seeded(16, seed=91).abs() + 0.5
            self.norm.num_batches_tracked = torch.tensor(7)
        self.to(dtype)

    def forward(self, images: Tensor) -> Tensor:
        x = self.up(self.body(self.norm(self.stem(images)).relu()))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


METHOD = fp.QSPCA(6, 4, 0.1, tile=16)
IMAGES = seeded(4, 3, 8, 8, seed=5)


def packed_net(dtype: torch.dtype = torch.float32) -> fp.Packed:
    packed = fp.compress(Net(dtype), METHOD)
    kinds = {name: packed[name].kind for name in ("stem.weight", "body.weight", "up.weight", "head.weight")}
    assert list(kinds.values()) == ["keep", "factors", "factors", "scalar"]
    return packed


def trained(model: PackedModel, images: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("decoded", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["untrained", "trained"])
def test_forward_is_the_decoded_model_s(decoded: torch.dtype, loaded: torch.dtype, mode: str) -> None:
    """Whatever the types of the checkpoint and of the model it is trained in."""
    packed = packed_net(decoded)
    model = PackedModel(packed, Net(loaded))
    images = IMAGES.to(loaded)
    if mode == "trained":
        trained(model, images)
    after = fp.Packed(model.encoded(packed))
    fresh = after.load_into(Net(loaded)).eval()
    assert_close(model.eval()(images).detach(), fresh(images).detach(), max_eps(decoded, loaded, mode))
    for name, encoded in packed.items():
        assert after[name].dtype == encoded.dtype == packed.shapes()[name][0]


def max_eps(decoded: torch.dtype, loaded: torch.dtype, mode: str) -> torch.dtype:
    """Kept tensors are trained in the model's type and rounded when stored; all else is equal."""
    candidates = [torch.float32, loaded, decoded if mode == "trained" else loaded]
    return max(candidates, key=lambda dtype: torch.finfo(dtype).eps)


def test_untrained_the_whole_model_is_stored_as_it_was() -> None:
    packed = packed_net()
    after = PackedModel(packed, Net()).encoded(packed)
    assert list(after) == list(packed)
    for name in packed:
        assert_same_encoded(after[name], packed[name])


def test_only_what_the_packed_form_replaces_is_frozen() -> None:
    net = Net()
    model = PackedModel(packed_net(), net)
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    assert frozen == {"body.weight", "up.weight", "head.weight"}
    assert model.names == ["body.weight", "up.weight", "head.weight"]
    before = {name: net.get_parameter(name).clone() for name in frozen}
    trained(model, IMAGES)
    assert all(torch.equal(net.get_parameter(name), before[name]) for name in frozen)


def test_kept_tensors_are_trained_and_stored_in_their_type() -> None:
    kept = {"stem.weight": fp.Keep("float16"), "*.bias": fp.Keep("bfloat16")}
    packed = fp.compress(Net(), METHOD, layers=kept)
    net = Net()
    model = PackedModel(packed, net)
    trained(model, IMAGES)
    after = model.encoded(packed)
    for name in ("stem.weight", "stem.bias", "norm.weight", "norm.bias", "head.bias"):
        before, now = packed[name].parts["values"], after[name].parts["values"]
        assert now.dtype == before.dtype
        assert not torch.equal(now, before)
        assert_same_tensor(now, net.get_parameter(name).detach().to(before.dtype))
        assert (after[name].note, after[name].dtype) == (packed[name].note, torch.float32)
    assert after["stem.weight"].parts["values"].dtype == torch.float16
    assert after["head.bias"].parts["values"].dtype == torch.bfloat16


def test_buffers_are_carried() -> None:
    packed = packed_net()
    net = Net()
    model = PackedModel(packed, net)
    trained(model.train(), IMAGES, steps=2)
    after = model.encoded(packed)
    assert int(after["norm.num_batches_tracked"].parts["values"]) == 7 + 2
    for name in ("norm.running_mean", "norm.running_var"):
        values = after[name].parts["values"]
        assert_same_tensor(values, net.get_buffer(name))
        assert not torch.equal(values, packed[name].parts["values"])
    trained(model.eval(), IMAGES, steps=2)
    assert int(model.encoded(packed)["norm.num_batches_tracked"].parts["values"]) == 7 + 2


def test_what_is_stored_does_not_change_when_training_goes_on() -> None:
    packed = packed_net()
    model = PackedModel(packed, Net())
    trained(model, IMAGES)
    after = model.encoded(packed)
    copies = copy.deepcopy(after)
    trained(model, IMAGES)
    for name in after:
        assert_same_encoded(after[name], copies[name])


def test_tied_weights_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 16)
            self.head = nn.Linear(16, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.embed(words))  # type: ignore[no-any-return]

    packed = fp.compress(Tied(), fp.Scalar(4))
    assert packed.aliases == {"head.weight": "embed.weight"}
    model = PackedModel(packed, Tied())
    words = torch.arange(5)
    weight = decode(packed["embed.weight"])
    assert_close(model(words).detach(), weight[:5] @ weight.T)
    trained(model, words)
    after = decode(model.encoded(packed)["embed.weight"])
    assert not torch.equal(after, weight)
    assert_close(model(words).detach(), after[:5] @ after.T)


def test_a_packed_tensor_that_is_no_parameter() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", seeded(8, 8))

    with pytest.raises(fp.SourceError, match=r"\['table'\] are not parameters of the model"):
        PackedModel(fp.compress({"table": seeded(8, 8)}, fp.Scalar(4)), Buffered())


def test_another_model() -> None:
    with pytest.raises(fp.SourceError, match="the model lacks"):
        PackedModel(packed_net(), nn.Linear(4, 4))
