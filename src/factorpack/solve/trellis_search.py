"""Rounding along a trellis: the levels of a column's rows are chosen together, by error and code length.

Error feedback carries a row's rounding error only into that row's later columns, so the rows of one column
can be chosen together: a path runs down the rows of all groups. See quantize/trellis.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from factorpack.quantize.trellis import machine, segment_rows
from factorpack.solve.code_length import CLASSES, REACH, bits_of_counts, fit_lengths
from factorpack.solve.evenly import spread_evenly

FINE_STEP = 0.57
"""The levels' step relative to a plain step of equal error: a half, enlarged by the packing gain."""
QUIET_SHARE = 0.85
"""A column with a larger share of zeros has no path: there one quantizer is as good as two."""
MOSTLY_ZERO = 0.88
"""A class with a larger share of zeros starts with a cheap zero in the odd quantizer too."""
ROUNDS = 3
MANY_PATHS = 128
"""From this many paths on, going row by row over all of them is faster."""
MAGNITUDES = REACH + 1
CELLS = 2 * REACH + 10
"""Integer parts of magnitudes that are told apart; in the last four every index is beyond REACH."""
IN_CACHE = 1 << 14
"""Magnitudes whose candidates fit into a core's cache."""
BLOCK_ELEMENTS = 1 << 17
FITTED_ELEMENTS = 1 << 17
"""Elements that code lengths are fitted to."""


@dataclass(frozen=True, eq=False)
class TrellisLengths:
    """Rounds columns to the levels of the path that minimises the sum of (v - level)^2 + price * bits."""

    table: Tensor
    """Bits of an index's magnitude and sign by class and quantizer: (batch, CLASSES, 2, MAGNITUDES)."""
    row_class: Tensor
    """(batch, rows), and (batch, columns), int32: an element's class is their sum, clamped."""
    column_class: Tensor
    quiet: Tensor
    """Columns without a path, (batch, columns)."""
    price: float
    """The price of one bit, in squared steps of the levels."""
    states: int

    @cached_property
    def cells(self) -> Tensor:
        """See `Branches`; the kernels of a GPU do without."""
        return _cells(self.table, self.price)

    def __call__(self, column: int, values: Tensor) -> Tensor:
        """Levels for one column; the rows of all groups are concatenated."""
        rows = values.reshape(len(self.table), -1, 1)
        return self._paths(rows, slice(column, column + 1))[0].reshape(values.shape)

    def round_all(self, values: Tensor) -> Tensor:
        """Rounds all columns at once, (batch, rows, columns), without feedback."""
        return self.paths(values)[0]

    def paths(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The levels of every column, (batch, rows, columns), and their quantizers."""
        if values.is_cuda:
            from factorpack.solve.trellis_triton import follow_paths  # triton is there only with a GPU

            return follow_paths(values, self)
        levels, quantizers = torch.empty_like(values), torch.empty_like(values, dtype=torch.long)
        many = max(1, BLOCK_ELEMENTS // (values.shape[0] * values.shape[1]))
        for start in range(0, values.shape[2], many):
            part = slice(start, start + many)
            levels[:, :, part], quantizers[:, :, part] = self._paths(values[:, :, part], part)
        return levels, quantizers

    def _paths(self, values: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        batch, rows, width = values.shape
        segment = segment_rows(rows)
        classes = _to_segments(self._classes(columns), segment)
        branches = Branches.of(_to_segments(values.abs(), segment), classes, self.cells)
        costs = branches.costs()
        if rows % segment:  # padding after the last row costs nothing
            costs.unflatten(2, (batch, -1, width))[:, rows % segment :, :, -1] = 0
        taken = cheapest_path(costs, self.states)
        quiet = self.quiet[:, None, columns]
        if quiet.any():
            without_path = (costs[1] < costs[0]).long()
            taken = torch.where(quiet.expand(-1, -(-rows // segment), -1).reshape(-1), without_path, taken)
        sizes = _from_segments(branches.levels(taken), values)
        return torch.where(values < 0, -sizes, sizes), _from_segments(taken >> 1, values)

    def _classes(self, columns: slice) -> Tensor:
        """Each element's row in the flattened table of all batches and classes: (batch, rows, columns)."""
        first = CLASSES * torch.arange(len(self.table), device=self.table.device, dtype=torch.int32)
        classes = self.row_class[:, :, None] + self.column_class[:, None, columns]
        return classes.clamp_(0, CLASSES - 1).add_(first[:, None, None])

    def refit(self, levels: Tensor, quantizers: Tensor) -> TrellisLengths:
        """Code lengths from counts of index magnitudes; each non-zero one stands for two signs."""
        magnitude = ((levels.abs() + quantizers) / 2).floor().clamp_max(REACH).long()
        cell = (self._classes(slice(None)).long() * 2 + quantizers) * MAGNITUDES + magnitude
        counts = torch.bincount(cell.flatten(), minlength=self.table.numel()).to(levels)
        counts = counts.reshape(self.table.shape)
        spots = torch.arange(MAGNITUDES, device=levels.device, dtype=levels.dtype)
        return replace(self, table=bits_of_counts(counts, spots, 1 + (spots > 0).to(levels)))


def fit_trellis(values: Tensor, price: float, states: int) -> TrellisLengths:
    """Fits code lengths to (batch, rows, columns) values in units of the levels' step.

    One bit is worth `price` squared plain steps; the levels' step is FINE_STEP times the plain one.
    """
    coarse = values / 2
    plain = fit_lengths(coarse, price / (2 * FINE_STEP) ** 2)
    lengths = TrellisLengths(
        _initial_table(plain.table[:, :, REACH:]),
        plain.row_class.int(),
        plain.column_class.int(),
        (plain.round_all(coarse) == 0).to(values).mean(1) > QUIET_SHARE,
        price / FINE_STEP**2,
        states,
    )
    picked = spread_evenly(values.shape[2], FITTED_ELEMENTS // values.shape[1], values.device)
    some = replace(lengths, column_class=lengths.column_class[:, picked], quiet=lengths.quiet[:, picked])
    for _ in range(ROUNDS):
        some = some.refit(*some.paths(values[:, :, picked]))
    return replace(lengths, table=some.table)


def _initial_table(plain: Tensor) -> Tensor:
    """Initial bits by quantizer, from those of plain codes >= 0: (batch, CLASSES, 2, MAGNITUDES).

    Q1 does best without its zero, except where nearly all values are zero; a search that starts with a cheap
    zero elsewhere needs tens of rounds to give it up.
    """
    between = torch.cat([torch.full_like(plain[..., :1], 8.0), (plain[..., 1:] + plain[..., :-1]) / 2], -1)
    between[..., 1:] += (2 * torch.exp2(-between[..., 1:]).sum(-1, keepdim=True)).log2()
    is_quiet = torch.exp2(-plain[..., :1]) > MOSTLY_ZERO
    return torch.stack([plain, torch.where(is_quiet, plain, between)], -2)


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """For each magnitude, the cheapest level of each of the four subsets, 2 q + parity.

    It is the nearest index with that parity, or the next one towards zero. Which two levels these are depends
    on the magnitude's integer part u alone, its *cell*; with f the rest, a level L costs (u - L)^2 + bits, plus
    2 (u - L) f, plus f^2, which all levels share and which is left out. So one row of a table has it all.
    """

    row: Tensor
    """Rows of `cells`, and what is left of the magnitudes: (segment, paths)."""
    fraction: Tensor
    cells: Tensor
    beyond: Tensor | None
    """What levels are above those of the table's cells, where magnitudes are: (segment, paths)."""

    @classmethod
    def of(cls, size: Tensor, classes: Tensor, cells: Tensor) -> Branches:
        cell = size.to(torch.int32)
        fraction = size - cell
        beyond = None
        if bool((cell >= CELLS).any()):  # codes beyond REACH take the same bits: the last four cells repeat
            last = torch.where(cell >= CELLS, CELLS - 4 + (cell - CELLS) % 4, cell)
            beyond, cell = cell - last, last
        return cls(classes * CELLS + cell, fraction, cells, beyond)

    def costs(self) -> Tensor:
        """The cost of each subset: (4, segment, paths)."""
        costs = self.fraction.new_empty(4, *self.row.shape)
        many = max(1, IN_CACHE // self.row.shape[1])
        for start in range(0, len(self.row), many):
            part = slice(start, start + many)
            both = functional.embedding(self.row[part], self.cells)
            found = torch.addcmul(both[..., :8], both[..., 8:], self.fraction[part, :, None])
            costs[:, part] = torch.minimum(found[..., :4], found[..., 4:]).movedim(-1, 0)
        return costs

    def levels(self, taken: Tensor) -> Tensor:
        """The cheapest level of the subset that is taken at each place, (segment, paths)."""
        place = self.row.long() * 16 + taken
        near, lower = (
            torch.addcmul(self.cells.take(place + way), self.cells.take(place + 8 + way), self.fraction)
            for way in (0, 4)
        )
        cell = self.row % CELLS
        away = self.cells.take(place + 8 + 4 * (lower < near)) / 2  # u - L
        level = cell - away
        return level if self.beyond is None else level + self.beyond


def _cells(table: Tensor, price: float) -> Tensor:
    """Rows of (u - L)^2 + price bits, and of 2 (u - L), of eight levels L each: (batch * CLASSES * CELLS, 16).

    The first four are the nearest of each subset, the others the next ones towards zero.
    """
    cell = torch.arange(CELLS, device=table.device, dtype=table.dtype)[:, None]
    quantizer = torch.tensor([0.0, 0.0, 1.0, 1.0], device=table.device, dtype=table.dtype)
    parity = torch.tensor([0.0, 1.0, 0.0, 1.0], device=table.device, dtype=table.dtype)
    near = ((cell + 0.5 + quantizer - 2 * parity) / 4).round().clamp_min(0)
    index = parity + 2 * torch.cat([near, (near - 1).clamp_min(0)], 1).unflatten(1, (2, 4))
    away = cell[:, :, None] - (2 * index - quantizer * (index > 0))  # (CELLS, 2, 4)
    place = quantizer.long() * MAGNITUDES + index.clamp_max(REACH).long()
    bits = table.flatten(2)[:, :, place]  # (batch, CLASSES, CELLS, 2, 4)
    costs = away.square() + price * bits
    return torch.cat([costs.flatten(3), (2 * away).expand_as(costs).flatten(3)], 3).flatten(0, 2)


def cheapest_path(costs: Tensor, states: int) -> Tensor:
    """The subsets, (segment, paths), of the cheapest path from state 0, given the cost of each subset."""
    if costs.shape[2] >= MANY_PATHS:
        return path_by_rows(costs, states)
    return path_by_halves(costs, states)


def path_by_rows(costs: Tensor, states: int) -> Tensor:
    """The textbook Viterbi search: forward row by row, then backtracking."""
    source, subset = (table.to(costs.device).flatten() for table in _predecessors(states))
    rows, paths = costs.shape[1:]
    total = torch.full((states, paths), torch.inf, dtype=costs.dtype, device=costs.device)
    total[0] = 0
    choices = torch.empty((rows, states, paths), dtype=torch.bool, device=costs.device)
    ways = torch.empty((2 * states, paths), dtype=costs.dtype, device=costs.device)
    added, (first, second) = torch.empty_like(ways), ways.chunk(2)
    for row, of_subset in enumerate(costs.transpose(0, 1).contiguous()):
        torch.index_select(total, 0, source, out=ways)
        torch.index_select(of_subset, 0, subset, out=added)
        ways.add_(added)
        torch.lt(second, first, out=choices[row])
        torch.minimum(first, second, out=total)
    state, own = total.argmin(0), torch.arange(paths, device=costs.device)
    taken = torch.empty((rows, paths), dtype=torch.long, device=costs.device)
    for row in range(rows - 1, -1, -1):
        way = choices[row].take(state * paths + own).long().mul_(states).add_(state)
        torch.take(subset, way, out=taken[row])
        state = source.take(way)
    return taken


def path_by_halves(costs: Tensor, states: int) -> Tensor:
    """The same for few paths: costs between any two states over two rows, four rows, and so on; then backtracking.

    It does more work than row by row in far fewer steps, and with few paths the steps dominate. Rows are in
    bit-reversed order, so that neighbours lie in the two halves at every level. Two states two rows apart are
    connected in at most one way, so the first level is a sum.
    """
    between, middle = transitions(states).to(costs.device), _middle_states(states).to(costs.device)
    rows, paths = costs.shape[1:]
    order = _bit_reversed(rows).to(costs.device)
    padded = costs.new_zeros((5, len(order), paths))  # padding rows cost nothing
    padded[:4, :rows] = costs
    padded[4] = torch.inf
    first, second = padded[:, order].chunk(2, 1)
    start = torch.arange(states, device=costs.device)[:, None]
    pairs = first[between[start * states + middle]] + second[between[middle * states + start.T]]
    spans = [pairs]  # (states, states, pairs of rows, paths)
    while spans[-1].shape[2] > 1:
        first, second = spans[-1].chunk(2, 2)
        spans.append((first[:, :, None] + second[None]).amin(1))
    start = torch.zeros((1, paths), dtype=torch.long, device=costs.device)
    end = spans[-1][0].argmin(0)
    for span in reversed(spans[:-1]):
        first, second = span.chunk(2, 2)
        left = first.gather(0, start.expand(1, states, -1, -1))[0]
        right = second.gather(1, end.expand(states, 1, -1, -1))[:, 0]
        inner = (left + right).argmin(0)
        start, end = torch.cat([start, inner]), torch.cat([inner, end])
    inner = middle.take(start * states + end)
    taken = torch.cat([between.take(start * states + inner), between.take(inner * states + end)])
    return taken[order[:rows]]  # bit reversal is its own inverse


@cache
def _bit_reversed(rows: int) -> Tensor:
    """Row indices in bit-reversed order, for at least `rows` rows and two, up to a power of two."""
    order = torch.tensor([0, 1])
    while len(order) < rows:
        order = torch.cat([2 * order, 2 * order + 1])
    return order


@cache
def transitions(states: int) -> Tensor:
    """The subset that leads from one state to another, 4 if none does: (states * states,)."""
    of = machine(states)
    between = torch.full((states, states), 4)
    for state, parity in product(range(states), (0, 1)):
        between[state, int(of.after[state, parity])] = 2 * int(of.quantizer[state]) + parity
    return between.flatten()


@cache
def _middle_states(states: int) -> Tensor:
    """The state between two that are two rows apart: (states, states); an unconnected one if there is none."""
    open_ways = transitions(states).reshape(states, states) < 4
    ways = open_ways[:, :, None] & open_ways[None]  # (from, by, to)
    return ways.long().argmax(1)


@cache
def _predecessors(states: int) -> tuple[Tensor, Tensor]:
    """The two predecessors of each state, and the subsets that lead from them: (2, states) each."""
    between = transitions(states).reshape(states, states)
    source = (between < 4).T.nonzero()[:, 1].reshape(states, 2).T.contiguous()
    return source, between.gather(0, source)


def _to_segments(matrix: Tensor, segment: int) -> Tensor:
    """(batch, rows, columns) as segments side by side, the last padded with zeros: (segment, paths)."""
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -matrix.shape[1] % segment))
    paths: Tensor = padded.unflatten(1, (-1, segment)).movedim(2, 0).flatten(1)
    return paths


def _from_segments(paths: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_to_segments`, in the shape of `like`."""
    batch, rows, width = like.shape
    matrix: Tensor = paths.unflatten(1, (batch, -1, width)).movedim(0, 2).flatten(1, 2)
    return matrix[:, :rows]
