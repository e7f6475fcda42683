"""Rows of codes in cells: there and back, in the bytes promised, and where the kernel looks for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.quantize.uniform import code_range
from factorpack.runtime.code_rows import (
    GRAIN,
    WIDTHS,
    as_cells,
    fields,
    pack_rows,
    row_cells,
    suits,
    unpack_rows,
    unpack_rows_reference,
)
from tests.helpers import assert_same_tensor


def random_codes(bits: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    low, high = code_range(bits)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, (rows, columns), generator=generator).to(torch.int8)


@given(st.sampled_from(WIDTHS), st.integers(1, 9), st.integers(1, 700), st.integers(0, 5))
def test_unpacking_is_the_inverse_of_packing(bits: int, rows: int, columns: int, seed: int) -> None:
    codes = random_codes(bits, rows, columns, seed)
    packed = pack_rows(codes, bits)
    assert packed.dtype == torch.uint8
    assert 8 * packed.numel() == bits * rows * fields(bits) * row_cells(columns, bits)
    assert_same_tensor(unpack_rows_reference(packed, bits, columns), codes)
    assert_same_tensor(unpack_rows(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_whole_rows_take_the_width_of_their_codes(bits: int) -> None:
    columns = 3 * GRAIN * fields(bits)
    assert suits(columns, bits)
    assert 8 * pack_rows(random_codes(bits, 5, columns), bits).numel() == bits * 5 * columns


@given(st.integers(1, 16), st.integers(1, 10_000))
def test_what_is_laid_out_so_is_filled_up_by_a_sixteenth_at_most(bits: int, columns: int) -> None:
    if suits(columns, bits):
        assert columns <= fields(bits) * row_cells(columns, bits) <= columns * 17 / 16
    else:
        assert bits not in WIDTHS or fields(bits) * row_cells(columns, bits) > columns * 17 / 16


@pytest.mark.parametrize("bits", [2, 4])
def test_a_code_lies_at_its_place_of_its_cell(bits: int) -> None:
    """Code f of cell h is column f H + h, its sign turned into an offset."""
    codes = random_codes(bits, 2, 300)
    cells, count = as_cells(pack_rows(codes, bits), bits).long() & 0xFFFF, row_cells(300, bits)
    for column in range(300):
        field, cell = divmod(column, count)
        found = (cells[:, cell] >> bits * field) & ((1 << bits) - 1)
        assert (found - (1 << (bits - 1))).tolist() == codes[:, column].tolist()


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_operator_keeps_the_rules_of_operators(bits: int) -> None:
    torch.library.opcheck(unpack_rows, (pack_rows(random_codes(bits, 3, 37), bits), bits, 37))
