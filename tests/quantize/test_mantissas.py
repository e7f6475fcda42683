from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.quantize.mantissas import FLOAT_TYPES, round_mantissas, used_bits
from tests.helpers import assert_same_tensor, raw, seeded


def all_halves(bits: int) -> Tensor:
    """Every finite FP16 value with so many bits of mantissa, in ascending order."""
    kept = torch.arange(-(1 << 15), 1 << 15, 1 << (10 - bits)).to(torch.int16).view(torch.float16)
    return kept[kept.isfinite()].double().unique()


@given(st.floats(-65504, 65504, width=16), st.integers(1, 10), st.floats(-1, 1))
def test_a_value_becomes_the_nearest(value: float, bits: int, away: float):
    number = value * (1 + away / 2048)
    found = round_mantissas(torch.tensor([number], dtype=torch.float64), bits, torch.float16).double()
    nearest = all_halves(bits)
    distance = (nearest - number).abs().min()
    if abs(number) < nearest[-1]:
        assert (found - number).abs() == distance
        assert found in nearest
    assert used_bits(found.half()) <= (bits if abs(number) <= nearest[-1] else 10)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_rounding_twice_changes_nothing_and_odd_values_stay(dtype: torch.dtype):
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max, -1.0])
    values = torch.cat([odd, seeded(50), 1e-6 * seeded(50, seed=1)]).to(dtype)
    once = round_mantissas(values, 5, dtype)
    assert raw(once[:7]) == raw(values[:7])
    assert_same_tensor(round_mantissas(once, 5, dtype), once)
    assert used_bits(once[7:]) == 5
    normal = values[7:].abs() > torch.finfo(dtype).smallest_normal
    error = ((once - values)[7:].double() / values[7:].double()).abs()
    assert error[normal].max() <= 2.0**-6


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_bits_are_counted_from_the_highest(dtype: torch.dtype):
    last = FLOAT_TYPES[dtype].mantissa_bits
    assert [used_bits(torch.tensor([1.0, 1 + 2.0**-bit]).to(dtype)) for bit in (1, last)] == [1, last]
    assert [used_bits(torch.tensor(values).to(dtype)) for values in ([], [4.0, -0.5], [torch.inf])] == [
        0,
        0,
        0,
    ]
    assert used_bits(torch.tensor([[1.0, 1.5], [1.25, 2.0]]).to(dtype).T[1]) == 1
