"""Which entropy model codes which entry of a matrix: the class of its row plus the class of its column.

Rows and columns of weights differ in scale. Classes start as logarithms of mean magnitudes. Then rows and
columns alternately take the class that codes them shortest, and the models are fitted again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from factorpack.format.frequency_tables import Counts

MAX_CLASSES = 32
"""Most classes of rows, and of columns."""
_ROUNDS = 4
_SAMPLE = 1024
"""Entries of a row or column that its class is fitted to: enough to know its scale within a few percent."""
_BLOCK = 1 << 21
"""Elements of the largest array that fitting makes."""
_EXACT_BINS = 24
"""Symbols that fitting distinguishes; larger ones are binned by magnitude."""

Symbols = NDArray[np.unsignedinteger]
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


def one_class(rows: int, columns: int) -> Classing:
    return Classing(np.zeros(rows, np.int64), np.zeros(columns, np.int64))


def fit_classes(symbols: Symbols, step: float, with_columns: bool = True) -> Classing:
    """Classes for symbols sorted by the magnitude of their codes, (r, n); `step` is a class's width in octaves."""
    bins = _binned(symbols)
    size = int(bins.max()) + 1
    rows = _start(bins.mean(1), step)
    columns = _start(bins.mean(0), step) if with_columns else np.zeros(bins.shape[1], np.int64)
    upright = np.ascontiguousarray(bins.T) if with_columns else bins
    picked = _sample(bins.shape[1])
    models = Classing(rows, columns).models  # from all columns: the sample may miss the last class
    counts = class_counts(bins.take(picked, 1), Classing(rows, columns[picked]), size, models)
    lengths = _code_lengths(counts)
    for _ in range(_ROUNDS):
        if with_columns:
            columns, lengths = _reassigned(upright, columns, rows, lengths)
        rows, lengths = _reassigned(bins, rows, columns, lengths)
    # Without column classes the order of classes is free, and unused ones can be dropped.
    return (
        Classing(rows, columns)
        if with_columns
        else Classing(np.unique(rows, return_inverse=True)[1], columns)
    )


def class_counts(symbols: Symbols, classing: Classing, size: int, models: int = 0) -> Counts:
    """How often each model meets each symbol: (models, size); `models` can request more rows than occur."""
    models = max(models, classing.models)
    counts = np.zeros(models * size, np.int64)
    offsets = classing.columns * size
    height = max(1, _BLOCK // max(symbols.shape[1], 1))
    for top in range(0, len(symbols), height):
        index = symbols[top : top + height] + offsets
        index += (classing.rows[top : top + height] * size)[:, None]
        counts += np.bincount(index.ravel(), minlength=models * size)
    return counts.reshape(models, size)


def _binned(symbols: Symbols) -> Bins:
    """Symbols as fitting sees them: large ones fall into four bins per octave."""
    size = int(symbols.max()) + 1
    if size <= _EXACT_BINS:
        return symbols.astype(np.uint8)
    number = np.arange(size)
    far = _EXACT_BINS + np.floor(4 * np.log2(np.maximum(number, _EXACT_BINS) / _EXACT_BINS))
    bins: Bins = np.where(number < _EXACT_BINS, number, far).astype(np.uint8)[symbols]
    return bins


def _start(means: NDArray[np.float64], step: float) -> Classes:
    """Classes of equal width in the logarithm of the mean; the few outermost join the nearest class."""
    scale = np.log2(means + 2.0**-4) / step
    low, high = np.quantile(scale, (0.02, 0.995))
    classes = np.rint(scale - low).clip(0, min(round(high - low), MAX_CLASSES - 1)).astype(np.int64)
    return np.asarray(classes - classes.min())


def _reassigned(bins: Bins, own: Classes, other: Classes, lengths: Lengths) -> tuple[Classes, Lengths]:
    """The class of each row of (u, v) that codes it shortest, its own cost included, and new code lengths."""
    size, classes, others = lengths.shape[1], int(own.max()) + 1, int(other.max()) + 1
    shifted = np.stack(
        [lengths[each : each + others].ravel() for each in range(classes)], 1
    )  # (others * S, c)
    share = np.bincount(own, minlength=classes) + 0.5
    picked = _sample(bins.shape[1])
    price = np.log2(share.sum() / share) * len(picked) / bins.shape[1]
    moved = np.empty_like(own)
    counts = np.zeros((classes, others * size), np.float32)
    height = max(1, _BLOCK // max(others * size, len(picked)))
    for top in range(0, len(bins), height):
        part = _histograms(bins[top : top + height].take(picked, 1), other[picked], others, size)
        best = (part @ shifted + price).argmin(1)
        moved[top : top + height] = best
        counts += (best == np.arange(classes)[:, None]).astype(np.float32) @ part
    low, high = int(moved.min()), int(moved.max()) + 1
    return moved - low, _code_lengths(_folded(counts[low:high].reshape(high - low, others, size)))


def _histograms(bins: Bins, other: Classes, others: int, size: int) -> NDArray[np.float32]:
    """For each row of (u, v), how often each class of columns has each bin: (u, others * size)."""
    index = bins + (other * size)
    index += (np.arange(len(bins)) * (others * size))[:, None]
    counts = np.bincount(index.ravel(), minlength=len(bins) * others * size)
    return counts.reshape(len(bins), others * size).astype(np.float32)


def _folded(counts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Counts by two classes, (a, b, S), to counts by their sum, (a + b - 1, S)."""
    classes, others, size = counts.shape
    total = np.zeros((classes + others - 1, size), np.float32)
    for each in range(others):
        total[each : each + classes] += counts[:, each]
    return total


def _code_lengths(counts: NDArray[np.float32] | Counts) -> Lengths:
    """Bits per bin in each model. Neighbours and the total smooth the models that saw few codes."""
    smooth = counts + 0.02 * (counts.sum(0) + 0.5) / (counts.sum() + 1)
    smooth[1:] += 0.02 * counts[:-1]
    smooth[:-1] += 0.02 * counts[1:]
    lengths: Lengths = np.log2(smooth.sum(1, keepdims=True) / smooth).astype(np.float32)
    return lengths


@lru_cache(maxsize=64)
def _sample(count: int) -> NDArray[np.int64]:
    """Positions spread over `count` without a period, so that no kernel position is missed."""
    if count <= _SAMPLE:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:_SAMPLE])
