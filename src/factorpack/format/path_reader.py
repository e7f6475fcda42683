"""Paths from the indices that a stream holds: a row's quantizers are known once the rows above it are read.

All paths advance together, one row of every segment at a time. The indices of such a step come by model, and
within a model segment by segment and column by column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError
from factorpack.format.classes import Classing
from factorpack.format.symbols import Codes, count_values
from factorpack.quantize.trellis import Flags, Integers, Quantizers, levels_of, machine

NARROW = 16
"""Entries of a step up to which they are read one by one."""
SLAB = 1 << 18
"""Entries of a step that are sorted at a time."""


class Indices:
    """The indices of each model in the order in which paths ask for them: from a chunk, or from the message."""

    def __init__(self, coder: Any, models: list[Any], order: Codes, chunked: Mapping[int, Codes]) -> None:
        """`models` are constriction's, or None for a table of one symbol; chunks hold codes, not symbols."""
        self._coder, self._models, self.order, self._chunked = coder, models, order, chunked
        self._at = dict.fromkeys(chunked, 0)

    def next(self, model: int, count: int) -> Codes:
        if model in self._chunked:
            start = self._at[model]
            self._at[model] += count
            found = self._chunked[model][start : start + count]
            if len(found) < count:
                raise FormatError(f"a chunk of {len(self._chunked[model])} indices ends before its paths do")
            return found
        coded = self._models[model]
        if coded is None:
            return np.full(count, self.order[0])
        symbols: NDArray[np.int32] = self._coder.decode(coded, count)
        return self.order.take(symbols)

    def check_end(self) -> None:
        """Nothing is left once all paths are read."""
        if not self._coder.is_empty():
            raise FormatError("an entropy-coded message is longer than its codes")
        left = sum(len(chunk) - self._at[model] for model, chunk in self._chunked.items())
        if left:
            raise FormatError(f"{left} indices of chunks belong to no path")


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """What a stream says of its paths before their indices."""

    classing: Classing
    quiet: Flags
    states: int
    segment: int

    def read(self, indices: Indices) -> Codes:
        """The levels of all rows and columns."""
        rows, columns = len(self.classing.rows), len(self.classing.columns)
        wide = np.int16 if indices.order.itemsize == 1 else np.int32
        levels: Codes = np.empty((rows, columns), wide)
        is_narrow = -(-rows // self.segment) * columns <= NARROW
        (self._read_one_by_one if is_narrow else self._read_together)(indices, levels)
        return levels

    def _read_together(self, indices: Indices, levels: Codes) -> None:
        """Row by row, all segments and columns at once."""
        segment, rows = self.segment, len(levels)
        quantizers = Quantizers(self.states, self.quiet)
        for row in range(min(segment, rows)):
            quantizer = quantizers.next(len(range(row, rows, segment)))
            of_entry = models_of(self.classing, slice(row, None, segment), quantizer).ravel()
            found = _read_step(indices, of_entry).reshape(quantizer.shape)
            for left in range(0, levels.shape[1], SLAB):
                own = (slice(None), slice(left, left + SLAB))
                levels[row::segment][own] = levels_of(found[own], quantizer[own])
            quantizers.follow(found)

    def _read_one_by_one(self, indices: Indices, levels: Codes) -> None:
        """For a few entries per step, arrays take longer than numbers."""
        of, segment = machine(self.states), self.segment
        quantizers, after = of.quantizer.tolist(), of.after.tolist()
        of_rows, of_columns = self.classing.rows.tolist(), self.classing.columns.tolist()
        rows = len(of_rows)
        state = of.start(self.quiet, -(-rows // segment)).tolist()
        for first in range(min(segment, rows)):
            entries = [
                (2 * (of_rows[row] + of_column) + quantizers[state[part][column]], part, column)
                for part, row in enumerate(range(first, rows, segment))
                for column, of_column in enumerate(of_columns)
            ]
            for model, part, column in sorted(entries):
                index = int(indices.next(model, 1)[0])
                sign = (index > 0) - (index < 0)
                levels[first + part * segment, column] = 2 * index - quantizers[state[part][column]] * sign
                state[part][column] = after[state[part][column]][index & 1]


def models_of(classing: Classing, rows: slice, quantizer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The model of every entry of some rows: twice its class, plus its quantizer."""
    models: NDArray[np.uint8] = classing.rows[rows, None].astype(np.uint8) + classing.columns.astype(np.uint8)
    models += models
    models += quantizer
    return models


def by_model(models: NDArray[np.uint8]) -> tuple[Integers, list[int]]:
    """Positions of a step's entries sorted by model, and how many each model has."""
    return np.argsort(models.ravel(), kind="stable"), np.bincount(models.ravel()).tolist()


def _read_step(indices: Indices, of_entry: NDArray[np.uint8]) -> Codes:
    """The indices of one step's entries, in place."""
    if len(of_entry) > SLAB:
        return _read_wide_step(indices, of_entry)
    picked, sizes = by_model(of_entry)
    parts = [indices.next(model, size) for model, size in enumerate(sizes) if size]
    found = np.empty(len(of_entry), indices.order.dtype)
    found[picked] = np.concatenate(parts)
    return found


def _read_wide_step(indices: Indices, of_entry: NDArray[np.uint8]) -> Codes:
    """`_read_step` slab by slab: sorting takes eight bytes per entry, and looking up codes takes twelve."""
    sizes = count_values(of_entry, 1)
    read, at = np.empty(len(of_entry), indices.order.dtype), 0
    for model, size in enumerate(sizes.tolist()):
        for start in range(at, at + size, SLAB):
            count = min(SLAB, at + size - start)
            read[start : start + count] = indices.next(model, count)
        at += size
    found, starts = np.empty_like(read), np.cumsum(sizes) - sizes
    for top in range(0, len(of_entry), SLAB):
        picked, counts = by_model(of_entry[top : top + SLAB])
        parts = [read[start : start + count] for start, count in zip(starts, counts, strict=False)]
        found[top : top + SLAB][picked] = np.concatenate(parts)
        starts[: len(counts)] += counts
    return found
