"""How to write a matrix of symbols: which view, which classes, which total of the tables; the shortest found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from factorpack.format import frequency_tables as tables
from factorpack.format.blocks import to_blocks
from factorpack.format.classes import Classing, fit_both, fit_rows, one_class, sample
from factorpack.format.frequency_tables import Counts
from factorpack.format.symbols import Symbols, count_values, to_view

_FEW_CODES = 128
"""With fewer codes, classes do not pay."""
MANY_CODES = 1 << 20
"""With at least as many codes, classes of half the width pay."""
_TOTALS = (8, 10, 12, 14, 16)
_FIRST = 2
"""The total that is tried first."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One way to write a matrix: its view, the classes, and counts of row classes, column classes and codes."""

    split: int
    classing: Classing
    counts: list[Counts]
    blocks: list[Symbols] = field(default_factory=list)
    """The symbols of each model."""

    def tables(self, total_bits: int) -> list[Counts]:
        return [tables.normalized(counts, total_bits) for counts in self.counts]

    def coded_bytes(self, total_bits: int) -> NDArray[np.float64]:
        """Bytes that each model's codes and table take in the message."""
        frequencies = tables.normalized(self.counts[2], total_bits)
        message = tables.message_bits(self.counts[2], frequencies, total_bits)
        return (message + tables.table_bits(frequencies, total_bits)) / 8

    def bits(self, total_bits: int) -> float:
        """Bits of tables and message; infinite where the symbols do not fit the total."""
        counts = self._joined()
        if int(np.count_nonzero(counts, 1).max()) > 1 << total_bits:
            return np.inf
        frequencies = tables.normalized(counts, total_bits)
        message = tables.message_bits(counts, frequencies, total_bits).sum()
        written = tables.table_bits(frequencies, total_bits).sum()
        models, symbols = self.counts[2].shape
        return float(message + written + models * tables.size_bits(symbols))

    def _joined(self) -> Counts:
        """All counts in one array: a table that ends in zeros is as long as without them."""
        joined = np.zeros((sum(map(len, self.counts)), max(each.shape[1] for each in self.counts)), np.int64)
        top = 0
        for each in self.counts:
            joined[top : top + len(each), : each.shape[1]] = each
            top += len(each)
        return joined


def class_width(codes: int) -> float:
    """The width of classes of rows and columns, in octaves."""
    return 0.25 if codes >= MANY_CODES else 0.5


def best_plan(symbols: Symbols, size: int, split: int) -> tuple[Plan, int, float]:
    """The shortest plan found, its total, and its bits without the header."""
    return shortest(plans(symbols, size, split))


def shortest(plans: Iterable[Plan]) -> tuple[Plan, int, float]:
    """The shortest of some plans, its total, and its bits without the header."""
    found = [(plan, *_best_total(plan)) for plan in plans]
    return min(found, key=lambda each: each[2])


def _best_total(plan: Plan) -> tuple[int, float]:
    """The total with which a plan is shortest, and its bits, which fall with the total and then rise."""
    bits = {_FIRST: plan.bits(_TOTALS[_FIRST])}
    for step in (-1, 1):
        at = min(bits, key=bits.__getitem__)
        while 0 <= (at := at + step) < len(_TOTALS) and at not in bits:
            bits[at] = plan.bits(_TOTALS[at])
            if not bits[at] <= min(bits.values()):
                break
    best = min(bits, key=lambda at: (bits[at], at))
    return _TOTALS[best], bits[best]


def plans(symbols: Symbols, size: int, split: int) -> Iterator[Plan]:
    """One model; classes of rows of the matrix; classes of rows and columns of its view."""
    yield _plan(symbols, size, 0, one_class(*symbols.shape))
    if symbols.size < max(_FEW_CODES, 4 * size):  # tables would outweigh the codes
        return
    if 1 in symbols.shape and not split:  # a class for each code would say what the code says
        return
    view, taken = to_view(symbols, split), sample(symbols, size)
    rows = fit_rows(taken, 0.5)
    if rows.models > 1:
        yield _plan(symbols, size, 0, rows)
    both = fit_both(sample(view, size) if split else taken, class_width(symbols.size))
    if both.models > 1:
        yield _plan(view, size, split, both)


def _plan(symbols: Symbols, size: int, split: int, classing: Classing) -> Plan:
    """The plan of a classing; for one class, the symbols are the block."""
    blocks = to_blocks(symbols, classing) if classing.models > 1 else [symbols.reshape(-1)]
    of_rows, of_columns = (np.bincount(classes)[None] for classes in (classing.rows, classing.columns))
    counts = np.stack([count_values(block, size) for block in blocks])
    return Plan(split, classing, [of_rows, of_columns, counts], blocks)
