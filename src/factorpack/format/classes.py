"""Which entropy model codes which entry of a matrix: the class of its row plus the class of its column.

Rows and columns of weights differ in scale. Classes start as logarithms of mean magnitudes. Then rows and
columns alternately take the class that codes them shortest, and the models are fitted again. A part of the
matrix is enough for that. At the end every row and column takes its class, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from factorpack.format.frequency_tables import Counts
from factorpack.format.symbols import Symbols, count_values

MAX_CLASSES = 32
"""Most classes of rows, and of columns."""
_ROUNDS, _FEW_MOVES = 6, 0.02
"""Fitting ends after this many rounds, or when at most this share of rows and columns moves."""
_SAMPLE = 1024
"""Entries of a row or column that its class is fitted to: enough to know its scale within a few percent."""
_CORE_SIDE = 384
"""Fewest rows and columns of the part of a matrix that models are fitted to."""
_BLOCK, _ROWS = 1 << 16, 64
"""Bins, or rows, of the histograms that are made at a time, so that they stay in a core's cache."""
_SMALL_PRODUCT = 1 << 18
"""Multiplications below which BLAS does not start threads of its own."""
_EXACT_BINS = 24
"""Symbols that fitting distinguishes; larger ones are binned by magnitude."""
_GRID, _LONGEST = 256, 40.0
"""Code lengths are multiples of 1/256 bit up to 40 bits: sums over a sample are exact in any order."""

Bins = NDArray[np.uint8]
Lengths = NDArray[np.float32]
Classes = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Classing:
    """Class of each row, (r,), and of each column, (n,), counted from 0."""

    rows: Classes
    columns: Classes

    @property
    def models(self) -> int:
        return int(self.rows.max()) + int(self.columns.max()) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A matrix of symbols, (r, n), as fitting sees it: some columns of all rows, and some rows."""

    symbols: Symbols
    bin_of: Bins
    """The bin of each symbol."""
    columns: NDArray[np.int64]
    by_row: Bins
    """Bins of these columns, (r, v)."""

    @property
    def size(self) -> int:
        return int(self.bin_of[-1]) + 1


def one_class(rows: int, columns: int) -> Classing:
    return Classing(np.zeros(rows, np.int64), np.zeros(columns, np.int64))


def sample(symbols: Symbols, size: int) -> Sample:
    """Takes the entries that classes are fitted to, for symbols below `size` sorted by magnitude."""
    bin_of, columns = _bins(size), _sample(symbols.shape[1])
    taken = symbols if len(columns) == symbols.shape[1] else symbols.take(columns, 1)
    return Sample(symbols, bin_of, columns, _binned(taken, bin_of))


def fit_rows(sample: Sample, step: float) -> Classing:
    """Classes of rows alone; `step` is a class's width in octaves."""
    (height, count), width = sample.by_row.shape, sample.symbols.shape[1]
    histograms = np.concatenate(
        [
            _histograms(sample.by_row[top : top + _ROWS], np.zeros(count, np.int64), 1, sample.size)
            for top in range(0, height, _ROWS)
        ]
    )
    rows = _start(histograms @ np.arange(sample.size) / count, step)
    for _ in range(_ROUNDS):
        lengths = _code_lengths(_sums_by_class(histograms, rows))
        before = rows
        rows = np.asarray((histograms @ lengths.T + _price(rows, count / width)).argmin(1))
        if np.array_equal(rows, before):
            break
    # The order of classes is free, and unused ones can be dropped.
    return Classing(np.unique(rows, return_inverse=True)[1], np.zeros(width, np.int64))


def fit_both(sample: Sample, step: float) -> Classing:
    """Classes of rows and of columns; `step` is a class's width in octaves."""
    height, width = sample.symbols.shape
    down = _sample(height)
    some_rows, some_columns = _core(sample.by_row[down])
    narrow = sample.by_row[down].take(some_columns, 1)
    rows, columns, lengths = _fit_core(narrow[some_rows], sample.size, step, height, width)
    if len(rows) < len(down):
        rows, lengths = _reassigned(narrow, rows, columns, lengths, width)
    if len(columns) < width:
        by_column = np.ascontiguousarray(_binned(sample.symbols[down], sample.bin_of).T)
        columns, lengths = _reassigned(by_column, columns, rows, lengths, height)
    if len(some_columns) < len(sample.columns) or len(rows) < height:
        rows, _ = _reassigned(sample.by_row, rows, columns[sample.columns], lengths, width)
    return Classing(rows - rows.min(), columns - columns.min())


def _core(bins: Bins) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which rows and columns models are fitted to: more of one where there are few of the other.

    Bin 0 tells least, so where most entries have it there are more of both.
    """
    some = np.count_nonzero(bins[:: max(1, len(bins) // 64)]) / bins[:: max(1, len(bins) // 64)].size
    side = round(_CORE_SIDE / max(some, 1 / 64) ** 0.25)
    most = [max(side, side * _CORE_SIDE // min(each, _CORE_SIDE)) for each in bins.shape[::-1]]
    return _sample(bins.shape[0], most[0]), _sample(bins.shape[1], most[1])


def _fit_core(
    bins: Bins, size: int, step: float, height: int, width: int
) -> tuple[Classes, Classes, Lengths]:
    """Classes of some rows and columns of a matrix of `height` and `width`, and the models' code lengths."""
    rows, columns = _start(bins.mean(1), step), _start(bins.mean(0), step)
    upright = np.ascontiguousarray(bins.T)
    lengths = _code_lengths(class_counts(bins, Classing(rows, columns), size))
    for _ in range(_ROUNDS):
        before = rows, columns
        columns, lengths = _reassigned(upright, columns, rows, lengths, height)
        rows, lengths = _reassigned(bins, rows, columns, lengths, width)
        moved = np.count_nonzero(rows != before[0]) + np.count_nonzero(columns != before[1])
        if moved <= _FEW_MOVES * (len(rows) + len(columns)):
            break
    return rows, columns, lengths


def class_counts(symbols: NDArray[np.integer], classing: Classing, size: int) -> Counts:
    """How often each model meets each symbol: (models, size)."""
    counts = np.zeros(classing.models * size, np.int64)
    rows, columns = ((each * size).astype(np.int32) for each in (classing.rows, classing.columns))
    height = max(1, _BLOCK // max(symbols.shape[1], 1))
    for top in range(0, len(symbols), height):
        index = symbols[top : top + height].astype(np.int32)
        index += columns
        index += rows[top : top + height, None]
        counts += count_values(index, len(counts))
    return counts.reshape(-1, size)


@lru_cache(maxsize=64)
def _bins(size: int) -> Bins:
    """The bin of each of `size` symbols: large ones fall into four bins per octave."""
    number = np.arange(size)
    far = _EXACT_BINS + np.floor(4 * np.log2(np.maximum(number, _EXACT_BINS) / _EXACT_BINS))
    return np.where(number < _EXACT_BINS, number, far).astype(np.uint8)


def _binned(symbols: Symbols, bin_of: Bins) -> Bins:
    return bin_of.take(symbols) if len(bin_of) > _EXACT_BINS else symbols.astype(np.uint8, copy=False)


def _start(means: NDArray[np.float64], step: float) -> Classes:
    """Classes of equal width in the logarithm of the mean; the few outermost join the nearest class."""
    scale = np.log2(means + 2.0**-4) / step
    low, high = np.quantile(scale, (0.02, 0.995))
    classes = np.rint(scale - low).clip(0, min(round(high - low), MAX_CLASSES - 1)).astype(np.int64)
    return np.asarray(classes - classes.min())


def _reassigned(
    bins: Bins, own: Classes, other: Classes, lengths: Lengths, whole: int
) -> tuple[Classes, Lengths]:
    """The class of each row of (u, v) that codes it shortest, its own cost included, and new code lengths.

    `own` are the classes so far, of these rows or of some of them; `other` those of the v entries, which
    are some of `whole`.
    """
    size, classes = lengths.shape[1], int(own.max()) + 1
    others = len(lengths) - classes + 1
    shifted = np.stack(
        [lengths[each : each + others].ravel() for each in range(classes)], 1
    )  # (others * S, c)
    price, numbers = _price(own, bins.shape[1] / whole), np.arange(classes)[:, None]
    height = max(1, min(_BLOCK // max(len(shifted), bins.shape[1]), _SMALL_PRODUCT // shifted.size))
    moved, counts = np.empty(len(bins), np.int64), np.zeros((classes, len(shifted)))
    for top in range(0, len(bins), height):
        part = _histograms(bins[top : top + height], other, others, size)
        best = (part @ shifted + price).argmin(1)
        moved[top : top + height] = best
        counts += (best == numbers).astype(np.float32) @ part
    low, high = int(moved.min()), int(moved.max()) + 1
    return moved - low, _code_lengths(_folded(counts[low:high].reshape(high - low, others, size)))


def _histograms(bins: Bins, other: Classes, others: int, size: int) -> NDArray[np.float32]:
    """For each row of (u, v), how often each class of columns has each bin: (u, others * size)."""
    width = others * size
    index = bins + (other * size).astype(np.int32)
    index += np.arange(0, len(bins) * width, width, dtype=np.int32)[:, None]
    return count_values(index, len(bins) * width).astype(np.float32).reshape(-1, width)


def _folded(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Counts by two classes, (a, b, S), to counts by their sum, (a + b - 1, S)."""
    classes, others, size = counts.shape
    total = np.zeros((classes + others - 1, size))
    for each in range(others):
        total[each : each + classes] += counts[:, each]
    return total


def _price(own: Classes, share: float) -> NDArray[np.float32]:
    """Bits that each class takes in the message, times the share of a row's entries that are counted."""
    found = np.bincount(own) + 0.5
    return _on_grid(np.log2(found.sum() / found) * share)


def _sums_by_class(histograms: NDArray[np.float32], classes: Classes) -> NDArray[np.float64]:
    """The sum of the rows of (u, K) of each class."""
    sums = np.zeros((int(classes.max()) + 1, histograms.shape[1]))
    for each in range(len(sums)):
        sums[each] = histograms[classes == each].sum(0, dtype=np.float64)
    return sums


def _code_lengths(counts: NDArray[np.float64] | Counts) -> Lengths:
    """Bits per bin in each model. Neighbours and the total smooth the models that saw few codes."""
    smooth = counts + 0.02 * (counts.sum(0) + 0.5) / (counts.sum() + 1)
    smooth[1:] += 0.02 * counts[:-1]
    smooth[:-1] += 0.02 * counts[1:]
    return _on_grid(np.log2(smooth.sum(1, keepdims=True) / smooth).clip(max=_LONGEST))


def _on_grid(bits: NDArray[np.float64]) -> NDArray[np.float32]:
    return (np.rint(bits * _GRID) / _GRID).astype(np.float32)


@lru_cache(maxsize=64)
def _sample(count: int, most: int = _SAMPLE) -> NDArray[np.int64]:
    """Positions spread over `count` without a period, so that no kernel position is missed."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:most])
