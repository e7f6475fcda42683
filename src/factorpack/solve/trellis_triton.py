"""Kernels for paths through a trellis: all paths of a matrix at once, and error feedback along them.

A Viterbi search goes row by row, and each row waits for the one before. So a state is a lane here, which finds the
smaller of two sums, and all that other rows do not depend on happens elsewhere: costs before, levels after.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from factorpack.quantize.trellis import LONGEST, segment_rows
from factorpack.solve.code_length import CLASSES, REACH
from factorpack.solve.feedback import TRELLIS_BLOCK
from factorpack.solve.trellis_search import TrellisLengths

SCRATCH = 2 * 4 * 2
"""Costs of a row: two halves, and in each the two ways into each of four kinds of state."""
PROGRAMS = 1 << 13
"""Columns, or segments of them, whose paths are searched at once where all values are known: what fills a GPU."""
WORD = 8
"""Rows whose costs are loaded while those before them are added up: what `_search` writes out."""
_SOME = ["rows", "segment", "width"]
_SIZES = [*_SOME, "group_rows", "first", "size", "factor_stride"]
"""A kernel for every shape would take longer to compile than to run."""


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
def _step(total, way, stay, cross, first, BIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Costs of all states one row on, given those of both ways there, and which way was cheaper as a bit."""
    stay += tl.gather(total, first, 0)
    cross += tl.gather(total, first + 1, 0)
    second = (cross < stay).to(tl.int32)
    return tl.minimum(stay, cross), tl.gather(way, first + second, 0) | (second << BIT)


@triton.jit  # type: ignore[untyped-decorator]
def _two_rows(total, way, costs, first, BIT: tl.constexpr, STATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two rows, whose costs were loaded at once: (STATES, 4)."""
    stays, crosses = tl.split(tl.reshape(costs, [STATES, 2, 2]))
    stay0, stay1 = tl.split(stays)
    cross0, cross1 = tl.split(crosses)
    total, way = _step(total, way, stay0, cross0, first, BIT)
    return _step(total, way, stay1, cross1, first, BIT + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _search(costs, far, last, ROWS: tl.constexpr, STATES: tl.constexpr, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The cheapest path from state 0 through `last` rows of costs, as four words of 32 rows each: see `_subsets`.

    A lane is a state, and keeps the way its cheapest path has come: a bit per row says from which of the two
    predecessors. The bits of WORD rows are passed on from state to state, above the state they began at; then
    those before them follow at once. So nothing is read but costs, and nothing is traced back.
    """
    state = tl.arange(0, STATES)
    if STATES == 8:
        pair = tl.where((state & 1) == 1, 3 - (state >> 2), state >> 2)
        quantizer = pair >> 1
    else:
        pair = state & 1
        quantizer = pair
    first, parity = 2 * pair, (state >> 1) & 1
    own = costs + (2 * quantizer + parity)[:, None] * ROWS * 2 + tl.arange(0, 4)[None, :]
    total = tl.where(state == 0, 0.0, far)
    way0, way1, way2, way3 = state * 0, state * 0, state * 0, state * 0
    rows0, rows2, rows4, rows6 = tl.load(own), tl.load(own + 4), tl.load(own + 8), tl.load(own + 12)
    for top in range(0, last, WORD):
        way = state
        ahead = own + tl.minimum(top + WORD, last - WORD) * 2
        next0, next2, next4, next6 = (
            tl.load(ahead),
            tl.load(ahead + 4),
            tl.load(ahead + 8),
            tl.load(ahead + 12),
        )
        total, way = _two_rows(total, way, rows0, first, 3, STATES)
        total, way = _two_rows(total, way, rows2, first, 5, STATES)
        total, way = _two_rows(total, way, rows4, first, 7, STATES)
        total, way = _two_rows(total, way, rows6, first, 9, STATES)
        rows0, rows2, rows4, rows6 = next0, next2, next4, next6
        origin, new, word = way & 7, (way >> 3) << top % 32, top // 32
        way0 = tl.gather(way0, origin, 0) | tl.where(word == 0, new, 0)
        way1 = tl.gather(way1, origin, 0) | tl.where(word == 1, new, 0)
        way2 = tl.gather(way2, origin, 0) | tl.where(word == 2, new, 0)
        way3 = tl.gather(way3, origin, 0) | tl.where(word == 3, new, 0)
    best = tl.argmin(total, 0)
    taken = state == best
    # The last rows' parities depend on the state after them.
    after, word = best, last // 32
    if STATES == 8:
        after = (best & 1) | ((best >> 1) & 2) | (((best << 1) ^ best) & 4)
    after = after << last % 32
    way0 = tl.sum(tl.where(taken, way0, 0), 0) | tl.where(word == 0, after, 0)
    way1 = tl.sum(tl.where(taken, way1, 0), 0) | tl.where(word == 1, after, 0)
    way2 = tl.sum(tl.where(taken, way2, 0), 0) | tl.where(word == 2, after, 0)
    way3 = tl.sum(tl.where(taken, way3, 0), 0) | tl.where(word == 3, after, 0)
    return way0, way1, way2, way3, tl.where(word == 4, after, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _subsets(way0, way1, way2, way3, way4, place, STATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The subset of each row on a path.

    A state's lowest bit is the quantizer of the row before it, and its two predecessors differ in theirs. So bit r
    of a path is the quantizer of row r - 1, and parities follow from the parity checks: see quantize/trellis.py.
    """
    word = place // 32
    low = tl.where(word == 0, way0, tl.where(word == 1, way1, tl.where(word == 2, way2, way3)))
    high = tl.where(word == 0, way1, tl.where(word == 1, way2, tl.where(word == 2, way3, way4)))
    bits = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    bits = (bits >> place % 32).to(tl.int32)
    parity = bits ^ (bits >> 2)
    if STATES == 8:
        parity = parity ^ (bits >> 3)
    return (bits & 2) | (parity & 1)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    magnitude,
    here,
    table,
    is_loud,
    costs,
    price,
    last,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    REACH: tl.constexpr,
    WORD: tl.constexpr,
):
    """The levels of a column's magnitudes, and their subsets: along the cheapest path where the column is loud.

    A thread has a row, and in the search a state. Only costs go from one to the other, through scratch memory, hence
    the barrier.
    """
    level0, cost0 = _cheapest(magnitude, 0, 0, table, price, REACH)
    level1, cost1 = _cheapest(magnitude, 0, 1, table, price, REACH)
    path = (cost1 < cost0).to(tl.int32)
    level2, level3 = level0, level0
    if is_loud:
        level2, cost2 = _cheapest(magnitude, 1, 0, table, price, REACH)
        level3, cost3 = _cheapest(magnitude, 1, 1, table, price, REACH)
        place = tl.arange(0, ROWS)
        mine = costs + place * 2
        cost0, cost1 = tl.where(here, cost0, 0.0), tl.where(here, cost1, 0.0)
        cost2, cost3 = tl.where(here, cost2, 0.0), tl.where(here, cost3, 0.0)
        tl.store(mine, cost0)
        tl.store(mine + 1, cost1)
        tl.store(mine + ROWS * 2, cost1)
        tl.store(mine + ROWS * 2 + 1, cost0)
        tl.store(mine + ROWS * 4, cost2)
        tl.store(mine + ROWS * 4 + 1, cost3)
        tl.store(mine + ROWS * 6, cost3)
        tl.store(mine + ROWS * 6 + 1, cost2)
        tl.debug_barrier()
        way0, way1, way2, way3, way4 = _search(costs, price * 0.0 + float("inf"), last, ROWS, STATES, WORD)
        path = _subsets(way0, way1, way2, way3, way4, place, STATES)
    level = tl.where(path == 0, level0, tl.where(path == 1, level1, tl.where(path == 2, level2, level3)))
    return level, path


@triton.jit(do_not_specialize=_SOME, do_not_specialize_on_alignment=_SOME)  # type: ignore[untyped-decorator]
def _follow_paths(  # type: ignore[no-untyped-def]
    values,
    bits,
    row_class,
    column_class,
    quiet,
    levels,
    quantizers,
    costs,
    rows,
    price,
    segment,
    width,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    REACH: tl.constexpr,
    CLASSES: tl.constexpr,
    WORD: tl.constexpr,
):
    """One program: a segment of the rows of one batch element, and every so many of its columns."""
    batch = tl.program_id(1).to(tl.int64)
    own = (batch * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(2) + tl.program_id(2)
    place = tl.arange(0, ROWS)
    row = tl.program_id(0) * segment + place
    here = (place < segment) & (row < rows)
    line = batch * rows + row
    classes = tl.load(row_class + line, here, 0)
    last = (segment + WORD - 1) // WORD * WORD
    costs += own * 2 * ROWS * 8
    turn = 0
    for index in range(tl.program_id(2), width, tl.num_programs(2)):
        value = tl.load(values + line * width + index, here, 0.0)
        kind = classes + tl.load(column_class + batch * width + index)
        kind = tl.minimum(tl.maximum(kind, 0), CLASSES - 1)
        table = bits + (batch * CLASSES + kind) * 2 * (REACH + 1)
        is_loud = tl.load(quiet + batch * width + index) == 0
        half = costs + turn * ROWS * 8
        level, path = _choose(
            tl.abs(value), here, table, is_loud, half, price, last, ROWS, STATES, REACH, WORD
        )
        turn = tl.where(is_loud, 1 - turn, turn)
        tl.store(levels + line * width + index, tl.where(value < 0, -level, level), here)
        tl.store(quantizers + line * width + index, (path >> 1).to(tl.int64), here)


def follow_paths(values: Tensor, lengths: TrellisLengths) -> tuple[Tensor, Tensor]:
    """The levels of every column of (batch, rows, columns), and their quantizers, without feedback."""
    batch, rows, width = values.shape
    segment = segment_rows(rows)
    count = -(-rows // segment)
    programs = max(1, min(width, PROGRAMS // (batch * count)))
    values = values.contiguous()
    levels, quantizers = torch.empty_like(values), torch.empty_like(values, dtype=torch.long)
    _follow_paths[(count, batch, programs)](
        values,
        lengths.table.contiguous(),
        lengths.row_class.contiguous(),
        lengths.column_class.contiguous(),
        lengths.quiet.contiguous().view(torch.uint8),
        levels,
        quantizers,
        values.new_empty(batch * count * programs * LONGEST * SCRATCH),
        rows,
        lengths.price,
        segment,
        width,
        ROWS=LONGEST,
        STATES=lengths.states,
        REACH=REACH,
        CLASSES=CLASSES,
        WORD=WORD,
        num_warps=4,
    )
    return levels, quantizers


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)  # type: ignore[untyped-decorator]
def _round_block(  # type: ignore[no-untyped-def]
    numbers,
    factor,
    step,
    bits,
    row_class,
    column_class,
    quiet,
    codes,
    residues,
    costs,
    rows,
    group_rows,
    first,
    size,
    factor_stride,
    price,
    segment,
    width,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    STATES: tl.constexpr,
    REACH: tl.constexpr,
    CLASSES: tl.constexpr,
    WORD: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """One program: a segment of the rows of one batch element, all `width` <= N columns of the block.

    Columns that are searched take turns in the two halves of the program's scratch memory, so that none is written
    while another thread still reads. Rows after the last cost nothing.
    """
    batch = tl.program_id(1).to(tl.int64)
    own = batch * tl.num_programs(0) + tl.program_id(0)
    place = tl.arange(0, ROWS)
    row = tl.program_id(0) * segment + place
    here = (place < segment) & (row < rows)
    line = batch * rows + row
    column = tl.arange(0, N)
    lines = tl.num_programs(1) * rows
    unit = tl.load(step + line, here, 1.0)
    classes = tl.load(row_class + line, here, 0)
    left = tl.load(
        numbers + line[None, :] + column[:, None] * lines, here[None, :] & (column < width)[:, None], 0.0
    )
    corner = factor + batch * (rows // group_rows) * factor_stride + first * size + first
    corners = corner + (row // group_rows).to(tl.int64) * factor_stride
    last = (segment + WORD - 1) // WORD * WORD
    costs += own * 2 * ROWS * 8
    turn = 0
    for index in range(width):
        later = (column > index) & (column < width)
        if GROUPED:
            across = tl.load(
                corners[None, :] + index * size + column[:, None], here[None, :] & later[:, None], 0.0
            )
            pivot = tl.load(corners + index * size + index, here, 1.0)
        else:
            across = tl.load(corner + index * size + column, later, 0.0)[:, None]
            pivot = tl.load(corner + index * size + index)
        number = tl.sum(tl.where((column == index)[:, None], left, 0.0), 0)
        value = number / unit
        magnitude = tl.abs(value)
        kind = classes + tl.load(column_class + batch * size + first + index)
        kind = tl.minimum(tl.maximum(kind, 0), CLASSES - 1)
        table = bits + (batch * CLASSES + kind) * 2 * (REACH + 1)
        is_loud = tl.load(quiet + batch * size + first + index) == 0
        half = costs + turn * ROWS * 8
        level, _ = _choose(magnitude, here, table, is_loud, half, price, last, ROWS, STATES, REACH, WORD)
        turn = tl.where(is_loud, 1 - turn, turn)
        code = tl.where(value < 0, -level, level)
        residue = (number - code * unit) / pivot
        left -= residue[None, :] * across
        tl.store(codes + index * lines + line, code, here)
        tl.store(residues + index * lines + line, residue, here)


def round_block(
    block: Tensor, factor: Tensor, first: int, step: Tensor, lengths: TrellisLengths
) -> tuple[Tensor, Tensor]:
    """Levels of (batch, rows, width) values, columns `first` on, and their residues: see feedback.py."""
    elements, group_rows, width = block.shape
    batch, rows = lengths.row_class.shape
    size, segment = factor.shape[-1], segment_rows(rows)
    columns = block.movedim(2, 0).contiguous()  # the rows of a column are read, and written, together
    codes, residues = torch.empty_like(columns), torch.empty_like(columns)
    count = -(-rows // segment)
    _round_block[(count, batch)](
        columns,
        factor,
        step.expand(elements, group_rows).contiguous(),
        lengths.table.contiguous(),
        lengths.row_class.contiguous(),
        lengths.column_class.contiguous(),
        lengths.quiet.contiguous().view(torch.uint8),
        codes,
        residues,
        block.new_empty(batch * count * LONGEST * SCRATCH),
        rows,
        group_rows,
        first,
        size,
        size * size,
        lengths.price,
        segment,
        width,
        N=TRELLIS_BLOCK,
        ROWS=LONGEST,
        STATES=lengths.states,
        REACH=REACH,
        CLASSES=CLASSES,
        WORD=WORD,
        GROUPED=group_rows < rows,
        num_warps=4,
    )
    return codes.movedim(0, 2), residues.movedim(0, 2)
