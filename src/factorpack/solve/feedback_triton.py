"""Error feedback within a block of columns as one kernel: rows are independent, columns are sequential."""

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from factorpack.solve.code_length import CLASSES, REACH, CodeLengths

ROWS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _round_block(  # type: ignore[no-untyped-def]
    numbers,
    factor,
    step,
    gains,
    row_class,
    column_class,
    codes,
    residues,
    rows,
    element_rows,
    first,
    size,
    factor_stride,
    price,
    lowest,
    highest,
    width: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    REACH: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One program: ROWS rows of one batch element, all `width` <= N columns of the block from `first` on."""
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    line = batch * rows + row
    column = tl.arange(0, N)
    inside = column < width
    left = tl.load(numbers + line[:, None] * width + column[None, :], here[:, None] & inside[None, :], 0.0)
    unit = tl.load(step + line, here, 1.0)
    classes = tl.load(row_class + line, here, 0)
    saved = gains + batch * CLASSES * (2 * REACH + 3) + REACH + 1
    corner = factor + batch * rows // element_rows * factor_stride + first * size + first
    for index in range(width):
        across = tl.load(corner + index * size + column, inside & (column >= index), 0.0)
        own = tl.sum(tl.where(column == index, across, 0.0), 0)
        number = tl.sum(tl.where((column == index)[None, :], left, 0.0), 1)
        value = number / unit
        near = tl.floor(value + 0.5)
        side = tl.where(near > 0, 1.0, 0.0) - tl.where(near < 0, 1.0, 0.0)
        kind = classes + tl.load(column_class + batch * size + first + index)
        offset = tl.minimum(tl.maximum(kind, 0), CLASSES - 1) * (2 * REACH + 3)
        spot = tl.minimum(tl.maximum(near, -REACH - 1), REACH + 1).to(tl.int32)
        gain = tl.load(saved + offset + spot)
        worse = 1.0 + 2.0 * side * (value - near)
        code = tl.where(worse < price * gain, near - side, near)
        code = tl.minimum(tl.maximum(code, lowest), highest)
        residue = (number - code * unit) / own
        left -= residue[:, None] * tl.where(column > index, across, 0.0)[None, :]
        tl.store(codes + line * width + index, code, here)
        tl.store(residues + line * width + index, residue, here)


def round_block(
    block: Tensor,
    factor: Tensor,
    first: int,
    step: Tensor,
    lengths: CodeLengths,
    limits: tuple[float, float] = (-inf, inf),
) -> tuple[Tensor, Tensor]:
    """Codes of (elements, rows, width) values, columns `first` on, and their residues: see feedback.py."""
    elements, element_rows, width = block.shape
    batch, rows = lengths.row_class.shape
    size = factor.shape[-1]
    block = block.contiguous()
    codes, residues = torch.empty_like(block), torch.empty_like(block)
    _round_block[(triton.cdiv(rows, ROWS), batch)](
        block,
        factor,
        step.expand(elements, element_rows).contiguous(),
        lengths.gains,
        lengths.row_class.to(torch.int32).contiguous(),
        lengths.column_class.to(torch.int32).contiguous(),
        codes,
        residues,
        rows,
        element_rows,
        first,
        size,
        size * size,
        lengths.price,
        float(limits[0]),
        float(limits[1]),
        width=width,
        N=max(triton.next_power_of_2(width), 16),
        ROWS=ROWS,
        REACH=REACH,
        CLASSES=CLASSES,
        num_warps=1,
    )
    return codes, residues
