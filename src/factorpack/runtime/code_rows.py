"""Rows of codes in cells: the layout from which a kernel multiplies without unpacking to memory.

A cell is a 16-bit integer that holds several codes. Codes at one position of all cells of a row are
neighbouring columns: code f of cell h is column f H + h of a row of H cells. A shift and a mask then turn a
tile of cells into a tile of codes, to be multiplied by a range of the inputs; nothing is interleaved.
Three bits do not divide sixteen. There, three cells lie a third of the row apart: each holds five codes, and
their three remaining bits make a sixteenth code. Codes of 8 bits are cells themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from factorpack.errors import WeightError
from factorpack.kinds import KINDS
from factorpack.record import Encoded

WIDTHS = (2, 3, 4, 8)
"""Bits per code that have this layout."""
GRAIN = 16
"""H is a multiple of it, so that every row begins where wide loads are allowed."""
PADDING = 1 / 16
"""The largest share of extra bytes, for padding rows to the grain, that is still worth it."""


def fields(bits: int) -> int:
    """Columns per cell, or per three cells for codes of three bits.

    >>> [fields(bits) for bits in WIDTHS]
    [8, 16, 4, 1]
    """
    return {3: 16, 8: 1}.get(bits, 16 // bits)


def row_cells(columns: int, bits: int) -> int:
    """H for rows of `columns` codes."""
    return -(-columns // (fields(bits) * GRAIN)) * GRAIN


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a row of `columns` codes."""
    return row_cells(columns, bits) * fields(bits) * bits // 8


def suits(columns: int, bits: int) -> bool:
    """Whether this layout suits rows: the width has it, and little padding is needed."""
    if bits not in WIDTHS:
        return False
    return row_cells(columns, bits) * fields(bits) <= (1 + PADDING) * columns


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Signed codes (rows, columns) -> bytes, (rows, bytes of H cells)."""
    rows, columns = codes.shape
    count = row_cells(columns, bits)
    numbers = codes.new_zeros(rows, fields(bits) * count, dtype=torch.int16)
    numbers[:, :columns] = codes
    if bits == 8:
        return numbers.to(torch.int8).view(torch.uint8)
    unsigned = (numbers + (1 << (bits - 1))).view(rows, -1, count)
    cells = unsigned.new_zeros(rows, 3 if bits == 3 else 1, count)
    each = 16 // bits
    for part in range(cells.shape[1]):
        for place in range(each):
            cells[:, part] |= unsigned[:, each * part + place] << bits * place
        if bits == 3:
            cells[:, part] |= ((unsigned[:, 15] >> part) & 1) << 15
    return cells.view(rows, -1).view(torch.uint8)


def check_rows(packed: Tensor, bits: int, columns: int) -> None:
    """Raises WeightError unless these are rows of `columns` codes: a kernel checks nothing."""
    if bits not in WIDTHS:
        raise WeightError(f"codes of {bits} bits, rows can have {', '.join(map(str, WIDTHS))}")
    expected = row_bytes(columns, bits)
    if packed.dtype != torch.uint8 or packed.ndim != 2 or packed.shape[1] != expected:
        found = f"{packed.dtype} of shape {tuple(packed.shape)}"
        raise WeightError(
            f"{found} for rows of {columns} codes of {bits} bits, expected {expected} bytes per row"
        )


def unpack_rows_reference(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack_rows`, in plain torch: (rows, columns), int8."""
    check_rows(packed, bits, columns)
    if bits == 8:
        return packed.view(torch.int8)[:, :columns].clone()
    rows, each = len(packed), 16 // bits
    cells = as_cells(packed, bits).view(rows, 3 if bits == 3 else 1, 1, -1)
    places = bits * torch.arange(each, dtype=torch.int16, device=packed.device)
    offset = 1 << (bits - 1)
    numbers = (cells >> places[:, None]).bitwise_and_(2 * offset - 1).sub_(offset).flatten(1, 2)
    codes = torch.empty(rows, fields(bits), numbers.shape[2], dtype=torch.int8, device=packed.device)
    codes[:, : numbers.shape[1]] = numbers
    if bits == 3:
        left = (cells[:, :, 0] < 0).to(torch.int8)
        codes[:, 15] = left[:, 0] + 2 * left[:, 1] + 4 * left[:, 2] - offset
    return codes.view(rows, -1)[:, :columns].contiguous()


@torch.library.custom_op("factorpack::unpack_rows", mutates_args=())
def unpack_rows(packed: Tensor, bits: int, columns: int) -> Tensor:
    """`unpack_rows_reference` as one operator, for the same reasons as `unpack_codes`."""
    return unpack_rows_reference(packed, bits, columns)


@unpack_rows.register_fake
def _(packed: Tensor, bits: int, columns: int) -> Tensor:  # noqa: ARG001
    return packed.new_empty(len(packed), columns, dtype=torch.int8)


def as_cells(packed: Tensor, bits: int) -> Tensor:
    """Packed rows of bytes as integers of a cell's width."""
    return packed.view(torch.int8 if bits == 8 else torch.int16)


def find_row_codes(encoded: Encoded) -> dict[str, tuple[int, int]]:
    """The part whose codes are laid out in rows, and its shape then: (outputs, codes per output)."""
    name = KINDS[encoded.kind].row_part(encoded)
    if name is None:
        return {}
    outputs = encoded.shape[0]
    columns = encoded.parts[name].numel() // outputs
    return {name: (outputs, columns)} if suits(columns, encoded.bits[name]) else {}
