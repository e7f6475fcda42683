"""Kernels for paths through a trellis: all paths of a matrix at once, and error feedback along them.

A state's two predecessors lie side by side, and each pair of states has the same two successors. So a row of a
Viterbi search is eight minima of two sums, written out here; which of the two was smaller is one bit per state.
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

SUBSETS = 4
LANES = 64
"""Paths per program, where all are known."""
AT_ONCE = 16
"""Rows whose costs are loaded before they are added up."""
_SIZES = ["rows", "group_rows", "first", "size", "factor_stride", "segment", "width"]
"""A kernel for every shape would take longer to compile than to run."""


@triton.jit  # type: ignore[untyped-decorator]
def _two(before, after, even, odd, EVEN: tl.constexpr, ODD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The costs of a pair of states' two successors, and the bits EVEN and ODD where they come from the second."""
    stay, cross = before + even, after + odd
    turn, other = before + odd, after + even
    chosen = tl.where(cross < stay, EVEN, 0) + tl.where(other < turn, ODD, 0)
    return tl.minimum(stay, cross), tl.minimum(turn, other), chosen


@triton.jit  # type: ignore[untyped-decorator]
def _advance(t0, t1, t2, t3, t4, t5, t6, t7, c0, c1, c2, c3, STATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The costs of all states one row on, given the costs of the four subsets, and one bit per state.

    With four states the other four are copies that nothing reads.
    """
    if STATES == 8:
        n0, n2, a = _two(t0, t1, c0, c1, 1, 4)
        n4, n6, b = _two(t2, t3, c0, c1, 16, 64)
        n5, n7, c = _two(t4, t5, c2, c3, 32, 128)
        n1, n3, d = _two(t6, t7, c2, c3, 2, 8)
        return n0, n1, n2, n3, n4, n5, n6, n7, a + b + c + d
    n0, n2, a = _two(t0, t1, c0, c1, 1, 4)
    n1, n3, b = _two(t2, t3, c2, c3, 2, 8)
    return n0, n1, n2, n3, n0, n1, n2, n3, a + b


@triton.jit  # type: ignore[untyped-decorator]
def _return(state, chosen, STATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state a row before, and the subset that led from there."""
    second = (chosen >> state) & 1
    if STATES == 8:
        pair = tl.where((state & 1) == 1, 3 - (state >> 2), state >> 2)
        quantizer = pair >> 1
    else:
        pair = state & 1
        quantizer = pair
    return 2 * pair + second, 2 * quantizer + (second ^ ((state >> 1) & 1))


@triton.jit  # type: ignore[untyped-decorator]
def _smaller(best, state, total, other: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.minimum(best, total), tl.where(total < best, other, state)


@triton.jit  # type: ignore[untyped-decorator]
def _cheapest_end(t0, t1, t2, t3, t4, t5, t6, t7, STATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first state of least cost."""
    best, state = _smaller(t0, t0.to(tl.int32) * 0, t1, 1)
    best, state = _smaller(best, state, t2, 2)
    best, state = _smaller(best, state, t3, 3)
    if STATES == 8:
        best, state = _smaller(best, state, t4, 4)
        best, state = _smaller(best, state, t5, 5)
        best, state = _smaller(best, state, t6, 6)
        best, state = _smaller(best, state, t7, 7)
    return state


@triton.jit(do_not_specialize=["rows", "paths", "plane"], do_not_specialize_on_alignment=["paths", "plane"])  # type: ignore[untyped-decorator]
def _find_paths(costs, choices, taken, rows, paths, plane, LANES: tl.constexpr, STATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: LANES paths, row by row and back."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = lane < paths
    t0 = tl.zeros([LANES], tl.float32)
    far = t0 + float("inf")
    t1, t2, t3, t4, t5, t6, t7 = far, far, far, far, far, far, far
    for row in range(rows):
        own = costs + row * paths + lane
        c0, c1 = tl.load(own, here, 0.0), tl.load(own + plane, here, 0.0)
        c2, c3 = tl.load(own + 2 * plane, here, 0.0), tl.load(own + 3 * plane, here, 0.0)
        t0, t1, t2, t3, t4, t5, t6, t7, chosen = _advance(
            t0, t1, t2, t3, t4, t5, t6, t7, c0, c1, c2, c3, STATES
        )
        tl.store(choices + row * paths + lane, chosen.to(tl.uint8), here)
    state = _cheapest_end(t0, t1, t2, t3, t4, t5, t6, t7, STATES)
    for back in range(rows):
        row = rows - 1 - back
        chosen = tl.load(choices + row * paths + lane, here, 0).to(tl.int32)
        state, subset = _return(state, chosen, STATES)
        tl.store(taken + row * paths + lane, subset.to(tl.int64), here)


def find_paths(costs: Tensor, states: int) -> Tensor:
    """As `cheapest_path` of trellis_search: the subsets, (segment, paths), of the cheapest path from state 0."""
    _, rows, paths = costs.shape
    taken = torch.empty((rows, paths), dtype=torch.long, device=costs.device)
    choices = torch.empty((rows, paths), dtype=torch.uint8, device=costs.device)
    _find_paths[(triton.cdiv(paths, LANES),)](
        costs.contiguous(),
        choices,
        taken,
        rows,
        paths,
        rows * paths,
        LANES=LANES,
        STATES=states,
        num_warps=LANES // 32,
    )
    return taken


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
    choices,
    taken,
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
    AT_ONCE: tl.constexpr,
):
    """One program: a segment of the rows of one batch element, all `width` <= N columns of the block.

    Costs, choices and the path go through the program's own scratch memory: threads read what others wrote,
    hence the barriers. The search itself is the same in all threads. Rows after the last cost nothing.
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
    last = (segment + AT_ONCE - 1) // AT_ONCE * AT_ONCE - 1
    costs += own * ROWS * 4
    choices += own * ROWS
    taken += own * ROWS
    for index in range(width):
        number = tl.load(numbers + line * width + index, here, 0.0)
        value = number / unit
        magnitude = tl.abs(value)
        kind = classes + tl.load(column_class + batch * size + first + index)
        kind = tl.minimum(tl.maximum(kind, 0), CLASSES - 1)
        table = bits + (batch * CLASSES + kind) * 2 * (REACH + 1)
        for subset in tl.static_range(4):
            _, cost = _cheapest(magnitude, subset // 2, subset % 2, table, price, REACH)
            tl.store(costs + place * 4 + subset, tl.where(here, cost, 0.0))
        tl.debug_barrier()
        t0 = price * 0.0
        far = t0 + float("inf")
        t1, t2, t3, t4, t5, t6, t7 = far, far, far, far, far, far, far
        for top in range(0, segment, AT_ONCE):
            for offset in tl.static_range(AT_ONCE):
                one = costs + (top + offset) * 4
                c0, c1, c2, c3 = tl.load(one), tl.load(one + 1), tl.load(one + 2), tl.load(one + 3)
                t0, t1, t2, t3, t4, t5, t6, t7, chosen = _advance(
                    t0, t1, t2, t3, t4, t5, t6, t7, c0, c1, c2, c3, STATES
                )
                tl.store(choices + top + offset, chosen)
        tl.debug_barrier()
        state = _cheapest_end(t0, t1, t2, t3, t4, t5, t6, t7, STATES)
        for top in range(0, segment, AT_ONCE):
            for offset in tl.static_range(AT_ONCE):
                above = last - top - offset
                state, led = _return(state, tl.load(choices + above), STATES)
                tl.store(taken + above, led)
        tl.debug_barrier()
        path = tl.load(taken + place, place < segment, 0)
        even, odd = tl.load(costs + place * 4), tl.load(costs + place * 4 + 1)
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
    count = -(-rows // segment)
    scratch_rows = batch * count * LONGEST
    _round_block[(count, batch)](
        block,
        factor,
        step.expand(elements, group_rows).contiguous(),
        lengths.table.contiguous(),
        lengths.row_class.to(torch.int32).contiguous(),
        lengths.column_class.to(torch.int32).contiguous(),
        lengths.quiet.to(torch.int32).contiguous(),
        codes,
        residues,
        block.new_empty(scratch_rows * SUBSETS),
        block.new_empty(scratch_rows, dtype=torch.int32),
        block.new_empty(scratch_rows, dtype=torch.int32),
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
        AT_ONCE=AT_ONCE,
        num_warps=4,
    )
    return codes, residues
