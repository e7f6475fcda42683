from __future__ import annotations

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.budget.norm_bits import (
    FEWEST_BITS,
    MOST_BITS,
    choose_norm_bits,
    count_norm_values,
    is_norm,
    round_as,
)
from factorpack.budget.norms import shrink, small_leftovers
from factorpack.budget.planner import BudgetRequest, Planner
from factorpack.budget.tensors import split_tensors
from factorpack.decoding import decode
from factorpack.methods import Keep
from factorpack.quantize.mantissas import round_mantissas, used_bits
from factorpack.source import open_source
from factorpack.weight import Weight
from tests.helpers import assert_same_tensor, relative_error, seeded


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("bn.weight", (8,), True),
        ("bn.running_var", (8,), True),
        ("weight", (8,), True),
        ("fc.bias", (8,), True),
        ("fc.weight", (8, 8), False),
        ("scale", (8,), False),
        ("rotary.inv_freq", (8,), False),
        ("bias", (), False),
    ],
)
def test_what_is_a_norm_or_a_bias(name: str, shape: tuple[int, ...], found: bool):
    assert is_norm(name, shape) == found


def test_statistics_are_constants_where_norms_are_folded():
    shapes = {"bn.weight": (8,), "bn.bias": (8,), "bn.running_mean": (8,), "bn.running_var": (8,), "x": (9,)}
    assert count_norm_values(shapes.items(), are_folded=False) == 32
    assert count_norm_values(shapes.items(), are_folded=True) == 16


@pytest.mark.parametrize(
    ("values", "weights", "ratio", "is_calibrated", "bits"),
    [
        (69_224, 3_470_760, 9, False, 7),  # MobileNetV2
        (69_224, 3_470_760, 12, False, 6),
        (35_112, 3_470_760, 9, True, 8),
        (35_112, 3_470_760, 14, True, 7),
        (20_200, 11_678_912, 20, False, 7),  # ResNet18
        (3_744, 15_000_000, 8, True, MOST_BITS),  # a language model has few norms
        (0, 1000, 8, True, MOST_BITS),
        (1000, 1000, 8, False, FEWEST_BITS),
        (1000, 10, 1e6, False, FEWEST_BITS),
    ],
)
def test_bits_follow_the_size(values: int, weights: int, ratio: float, is_calibrated: bool, bits: int):
    max_bytes = int(4 * (weights + values) / ratio)
    assert choose_norm_bits(values, weights, max_bytes, is_calibrated) == bits


def test_leftovers_are_rounded_where_they_are_norms_or_biases():
    vectors = {"bn.running_var": seeded(40).square(), "fc.bias": seeded(40), "inv_freq": seeded(40)}
    vectors |= {
        "small.weight": 1e-9 * seeded(40),
        "low.bias": seeded(40).bfloat16(),
        "matrix.bias": seeded(4, 9),
    }
    small = small_leftovers(
        {name: Keep().encode(Weight(value)) for name, value in vectors.items()}, None, True, 5
    )
    stored = {name: encoded.parts["values"] for name, encoded in small.items()}
    for name in ("bn.running_var", "fc.bias"):
        assert_same_tensor(stored[name], round_mantissas(vectors[name], 5, torch.float16))
    assert_same_tensor(stored["small.weight"], round_mantissas(vectors["small.weight"], 5, torch.float32))
    assert_same_tensor(stored["low.bias"], round_mantissas(vectors["low.bias"], 5, torch.bfloat16))
    for name in ("inv_freq", "matrix.bias"):
        assert_same_tensor(stored[name], vectors[name].half())


def test_folded_norms_are_rounded_once():
    """The scale and the shift are computed from exact statistics, and then rounded."""
    norm = nn.BatchNorm1d(30).eval()
    state = {"weight": seeded(30), "bias": seeded(30, seed=1), "running_mean": seeded(30, seed=2)}
    state["running_var"] = seeded(30, seed=3).square()
    kept = {f"0.{name}": Keep().encode(Weight(value)) for name, value in state.items()}
    small = small_leftovers(kept, nn.Sequential(norm), True, 6)
    scale = state["weight"].double() / (state["running_var"].double() + norm.eps).sqrt()
    shift = state["bias"].double() - state["running_mean"].double() * scale
    assert_same_tensor(small["0.weight"].parts["values"], round_mantissas(scale.float(), 6, torch.float16))
    assert_same_tensor(small["0.bias"].parts["values"], round_mantissas(shift.float(), 6, torch.float16))


def test_values_that_rounding_makes_zero_are_kept_where_they_matter():
    """2^-19 is below half the lowest FP16 value with 3 bits of mantissa."""
    for value, dtype in ((2.0**-19, torch.float32), (2.0**-17, torch.float16)):
        encoded = shrink(torch.tensor([0.5, 0.25, 0.125, value]), 3)
        assert encoded.parts["values"].dtype == dtype
        assert decode(encoded)[3] == value
    assert decode(shrink(torch.tensor([0.5, 0.25, 2.0**-22]), 3)).tolist() == [0.5, 0.25, 0.0]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
        for index, parameter in enumerate(self.parameters()):
            parameter.data.copy_(seeded(*parameter.shape, seed=index))
        norm = self[1]
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(seeded(64, seed=9))
        norm.running_var.copy_(seeded(64, seed=10).square() + 0.1)
        self.eval()


VECTORS = ("0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.bias")
STATE = Net().state_dict()


@pytest.mark.parametrize(("bits", "found"), [(0, 10), (3, 3), (5, 5), (10, 10)])
def test_a_budget_rounds_to_the_bits_it_is_told(bits: int, found: int):
    """Corrected means too: they are rounded after the correction."""
    packed = fp.compress(dict(STATE), ratio=6, planner=Planner(norm_bits=bits), progress=False)
    assert {name: used_bits(packed[name].parts["values"]) for name in VECTORS} == dict.fromkeys(
        VECTORS, found
    )


def test_what_norms_save_goes_to_the_weights():
    errors = []
    for bits in (0, 4):
        packed = fp.compress(dict(STATE), ratio=6, planner=Planner(norm_bits=bits), progress=False)
        errors.append(relative_error(decode(packed["3.weight"]), STATE["3.weight"]))
    assert errors[1] < 0.95 * errors[0]


def test_what_the_caller_excluded_keeps_its_bits():
    packed = fp.compress(dict(STATE), ratio=4, exclude=["1.*"], planner=Planner(norm_bits=4), progress=False)
    for name in VECTORS:
        if name.startswith("1."):
            assert_same_tensor(packed[name].parts["values"], STATE[name])


@pytest.mark.parametrize("bits", [-1, 11, True, 2.5])
def test_other_bits_are_refused_bits(bits: int):
    with pytest.raises(fp.PlanError, match="norm_bits"):
        Planner(norm_bits=bits)


def request() -> BudgetRequest:
    return BudgetRequest(open_source(dict(STATE)), None, None, Planner(), {}, ())


def test_a_size_that_only_fewer_bits_meet_has_them():
    tensors = split_tensors(request())
    wide, narrow = tensors.for_bytes(1 << 20), tensors.for_bytes(0)
    assert (wide.norm_bits, narrow.norm_bits) == (MOST_BITS, FEWEST_BITS)
    assert narrow.smallest_bytes < wide.smallest_bytes
    assert tensors.for_bytes(narrow.smallest_bytes).norm_bits == FEWEST_BITS


def test_what_did_not_change_is_joined_as_the_same_object():
    tensors = split_tensors(request()).for_bytes(9000)
    coded = {name: tensors.empty[name] for name in tensors.coded}
    first = tensors.join(coded, {})
    second = tensors.join(coded, {"1.running_mean": seeded(64, seed=20)})
    assert {name for name in first if first[name] is not second[name]} == {"1.running_mean"}


def test_trained_values_keep_the_bits_of_rounded_ones():
    trained = seeded(40, seed=1).half()
    assert used_bits(round_as(trained, round_mantissas(seeded(40), 6, torch.float16))) == 6
    for stored in (torch.ones(40).half(), seeded(40).half(), torch.ones(8).half() * 1.0625):
        assert_same_tensor(round_as(trained[: len(stored)], stored), trained[: len(stored)])
    wide, random = seeded(40, seed=1), round_mantissas(seeded(40), 22, torch.float32)
    assert_same_tensor(round_as(wide, random), wide)


def test_training_does_not_lengthen_rounded_norms():
    net = Net()
    packed = fp.compress(
        net, ratio=5, calibration=[seeded(64, 24)], planner=Planner(norm_bits=5), progress=False
    )
    before = {name: packed[name].parts["values"].clone() for name in ("1.weight", "1.bias", "0.bias")}
    schedule = fp.Schedule(
        epochs=1, learning_rate=3e-2, codes="frozen", batch_norm="frozen", held_out_share=0.0
    )
    batches = list(seeded(64, 24, seed=5).split(16))
    fp.finetune(packed, Net(), batches, teacher=net, schedule=schedule, progress=False)
    for name, values in before.items():
        now = packed[name].parts["values"]
        assert not torch.equal(now, values)
        assert used_bits(now) <= 5
