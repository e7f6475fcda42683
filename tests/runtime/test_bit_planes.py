"""Codes in bytes: there and back at every width, in as many bytes as promised, and as an operator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.quantize.uniform import code_dtype, code_range
from factorpack.runtime.bit_planes import (
    bit_plane_bytes,
    pack_codes,
    planes,
    unpack_at,
    unpack_codes,
    unpack_range,
    unpack_reference,
)
from tests.helpers import assert_same_tensor


def random_codes(bits: int, count: int, seed: int = 0) -> Tensor:
    low, high = code_range(bits)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, (count,), generator=generator).to(code_dtype(bits))


@given(st.integers(1, 16), st.integers(1, 200), st.integers(0, 5))
def test_unpacking_is_the_inverse_of_packing(bits: int, count: int, seed: int) -> None:
    codes = random_codes(bits, count, seed)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == bit_plane_bytes(count, bits)
    assert_same_tensor(unpack_reference(packed, bits, count), codes)
    assert_same_tensor(unpack_codes(packed, bits, count), codes)


@pytest.mark.parametrize("bits", range(1, 17))
def test_every_code_of_a_width_comes_back_and_takes_its_width(bits: int) -> None:
    low, high = code_range(bits)
    codes = torch.arange(low, high + 1).to(code_dtype(bits)).repeat(8)
    packed = pack_codes(codes, bits)
    assert 8 * len(packed) == bits * len(codes)
    assert_same_tensor(unpack_codes(packed, bits, len(codes)), codes)


@given(st.integers(1, 16), st.integers(1, 10_000))
def test_a_plane_wastes_less_than_a_byte(bits: int, count: int) -> None:
    assert sum(planes(bits)) == bits
    assert 0 <= 8 * bit_plane_bytes(count, bits) - bits * count < 8 * len(planes(bits))


@pytest.mark.parametrize("bits", [3, 8, 11])
def test_the_operator_keeps_the_rules_of_operators(bits: int) -> None:
    """Its fake twin says the right shape and type, nothing aliases its input, and it traces."""
    packed = pack_codes(random_codes(bits, 37), bits)
    torch.library.opcheck(unpack_codes, (packed, bits, 37))


@given(st.integers(1, 16), st.integers(1, 200), st.data())
def test_a_range_and_single_places_are_unpacked_without_the_rest(
    bits: int, count: int, data: st.DataObject
) -> None:
    codes = random_codes(bits, count)
    packed = pack_codes(codes, bits)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    before = packed.clone()
    assert_same_tensor(unpack_range(packed, bits, count, start, stop), codes[start:stop])
    places = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1))).reshape(1, -1)
    assert_same_tensor(unpack_at(packed, bits, count, places), codes[places])
    assert_same_tensor(packed, before)
