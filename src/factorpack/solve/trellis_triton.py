"""Error feedback along a trellis within a block of columns as one kernel: segments of rows are independent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from factorpack.quantize.trellis import segment_rows
from factorpack.solve.code_length import CLASSES, REACH
from factorpack.solve.trellis_search import TrellisLengths, transitions

SUBSETS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _cheapest(size, quantizer, parity, table, price, REACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest index with that parity, or the next one towards zero: its level and cost."""
    near = tl.maximum(tl.floor((size + (quantizer - 2 * parity)) / 4 + 0.5), 0.0)
    index = parity + 2 * near
    inner = parity + 2 * tl.maximum(near - 1, 0.0)
    level = 2 * index - tl.where(index > 0, quantizer, 0)
    lower = 2 * inner - tl.where(inner > 0, quantizer, 0)
    bits = table + quantizer * (REACH + 1)
    cost = (size - level) * (size - level) + price * tl.load(bits + tl.minimum(index, REACH).to(tl.int32))
    other = (size - lower) * (size - lower) + price * tl.load(bits + tl.minimum(inner, REACH).to(tl.int32))
    return tl.where(other < cost, lower, level), tl.minimum(cost, other)


@triton.jit  # type: ignore[untyped-decorator]
def _round_block(  # type: ignore[no-untyped-def]
    numbers,
    factor,
    step,
    bits,
    row_class,
    column_class,
    quiet,
    transitions,
    codes,
    residues,
    costs,
    choices,
    taken,
    rows,
    group_rows,
    first,
    size,
    factor_stride,
    price,
    segment: tl.constexpr,
    width: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    REACH: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One program: a segment of the rows of one batch element, all `width` <= N columns of the block.

    Branches, choices and the path go through the program's own scratch memory: threads read what others
    wrote, hence the barriers.
    """
    batch = tl.program_id(1).to(tl.int64)
    own = batch * tl.num_programs(0) + tl.program_id(0)
    place = tl.arange(0, ROWS)
    row = tl.program_id(0) * segment + place
    here = (place < segment) & (row < rows)
    line = batch * rows + row
    column = tl.arange(0, N)
    corner = factor + (line // group_rows) * factor_stride + first * size + first
    unit = tl.load(step + line, here, 1.0)
    classes = tl.load(row_class + line, here, 0)
    states = tl.arange(0, STATES)
    between = tl.load(transitions + states[:, None] * STATES + states[None, :])
    costs += own * ROWS * 5
    choices += own * ROWS * STATES
    taken += own * ROWS
    tl.store(costs + place * 5 + 4, tl.full([ROWS], float("inf"), tl.float32))
    for index in range(width):
        number = tl.load(numbers + line * width + index, here, 0.0)
        value = number / unit
        magnitude = tl.abs(value)
        kind = classes + tl.load(column_class + batch * size + first + index)
        kind = tl.minimum(tl.maximum(kind, 0), CLASSES - 1)
        table = bits + (batch * CLASSES + kind) * 2 * (REACH + 1)
        for subset in tl.static_range(4):
            _, cost = _cheapest(magnitude, subset // 2, subset % 2, table, price, REACH)
            tl.store(costs + place * 5 + subset, tl.where(here, cost, 0.0))
        tl.debug_barrier()
        total = tl.where(states == 0, 0.0, float("inf"))
        for step_down in range(segment):
            ways = total[:, None] + tl.load(costs + step_down * 5 + between)
            tl.store(choices + step_down * STATES + states, tl.argmin(ways, 0))
            total = tl.min(ways, 0)
        tl.debug_barrier()
        state = tl.argmin(total, 0)
        for step_up in range(segment):
            above = segment - 1 - step_up
            before = tl.load(choices + above * STATES + state)
            tl.store(taken + above, tl.load(transitions + before * STATES + state))
            state = before
        tl.debug_barrier()
        path = tl.load(taken + place, place < segment, 0)
        even, odd = tl.load(costs + place * 5), tl.load(costs + place * 5 + 1)
        is_quiet = tl.load(quiet + batch * size + first + index) != 0
        path = tl.where(is_quiet, (odd < even).to(path.dtype), path)
        level, _ = _cheapest(magnitude, path // 2, path % 2, table, price, REACH)
        code = tl.where(value < 0, -level, level)
        residue = (number - code * unit) / tl.load(corner + index * size + index, here, 1.0)
        after = here[:, None] & ((column > index) & (column < width))[None, :]
        across = tl.load(corner[:, None] + index * size + column[None, :], after, 0.0)
        left = numbers + line[:, None] * width + column[None, :]
        tl.store(left, tl.load(left, after, 0.0) - residue[:, None] * across, after)
        tl.store(codes + line * width + index, code, here)
        tl.store(residues + line * width + index, residue, here)
        tl.debug_barrier()


def round_block(
    block: Tensor, factor: Tensor, first: int, step: Tensor, lengths: TrellisLengths
) -> tuple[Tensor, Tensor]:
    """Levels of (batch, rows, width) values, columns `first` on, and their residues: see feedback.py.

    `block` is overwritten.
    """
    elements, group_rows, width = block.shape
    batch, rows = lengths.row_class.shape
    size, segment = factor.shape[-1], segment_rows(rows)
    block = block.contiguous()
    codes, residues = torch.empty_like(block), torch.empty_like(block)
    count, padded = -(-rows // segment), max(triton.next_power_of_2(segment), 16)
    scratch_rows = batch * count * padded
    _round_block[(count, batch)](
        block,
        factor,
        step.expand(elements, group_rows).contiguous(),
        lengths.table.contiguous(),
        lengths.row_class.to(torch.int32).contiguous(),
        lengths.column_class.to(torch.int32).contiguous(),
        lengths.quiet.to(torch.int32).contiguous(),
        transitions(lengths.states).to(block.device, torch.int32),
        codes,
        residues,
        block.new_empty(scratch_rows * (SUBSETS + 1)),
        block.new_empty(scratch_rows * lengths.states, dtype=torch.int32),
        block.new_empty(scratch_rows, dtype=torch.int32),
        rows,
        group_rows,
        first,
        size,
        size * size,
        lengths.price,
        segment=segment,
        width=width,
        N=max(triton.next_power_of_2(width), 16),
        ROWS=padded,
        STATES=lengths.states,
        REACH=REACH,
        CLASSES=CLASSES,
        num_warps=4,
    )
    return codes, residues
