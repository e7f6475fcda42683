from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factorpack.errors import FormatError
from factorpack.format.bitpack import bit_string_bytes, pack, unpack
from tests.format.reference import unpack_bits

WIDTHS = range(1, 17)


@st.composite
def packable(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    width = draw(st.sampled_from(WIDTHS))
    values = draw(st.lists(st.integers(0, (1 << width) - 1), max_size=70))
    return np.array(values, np.uint16), width


@given(packable())
def test_unpack_inverts_pack(case: tuple[np.ndarray, int]):
    values, width = case
    data = pack(values, width)
    assert len(data) == bit_string_bytes(len(values), width) == -(-len(values) * width // 8)
    assert unpack(data, len(values), width).tolist() == values.tolist()


@given(packable())
def test_layout_is_the_documented_one(case: tuple[np.ndarray, int]):
    values, width = case
    assert unpack_bits(pack(values, width), len(values), width) == values.tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_extremes_of_every_width(width: int):
    values = np.array([0, (1 << width) - 1, 0, (1 << width) - 1, 1], np.uint16)
    assert unpack(pack(values, width), 5, width).tolist() == values.tolist()


def test_known_bytes():
    assert pack(np.array([1, 2, 3], np.uint16), 3) == bytes([0b11_010_001, 0b0])
    assert pack(np.array([0x1FFF, 0], np.uint16), 13) == bytes([0xFF, 0x1F, 0x00, 0x00])


@given(packable(), st.integers(-3, 3).filter(bool))
def test_another_length_is_refused(case: tuple[np.ndarray, int], change: int):
    values, width = case
    data = pack(values, width)
    other = data[:change] if change < 0 else data + bytes(change)
    if len(other) != len(data):
        with pytest.raises(FormatError, match=f"{len(other)} bytes for {len(values)} values of {width} bits"):
            unpack(other, len(values), width)


@pytest.mark.parametrize("bit", range(5, 8))
def test_bits_after_the_last_value_are_refused(bit: int):
    with pytest.raises(FormatError, match="bits are set after the last value"):
        unpack(bytes([1 << bit]), 1, 5)
