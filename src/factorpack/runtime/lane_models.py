"""Which model codes which entry of a matrix in lanes, and the tables that a decoder looks up.

As in a file, the class of an entry is its row's class plus its column's, and each class has its own
frequencies. There are fewer classes than in a file, since each one's table takes memory.

A symbol is a code without its lowest `raw_bits`, which are nearly uniform where codes are wide. A table has
2^table_bits slots, and each symbol has as many of them as its frequency. The entry of a slot is an integer
of 32 bits: the frequency minus one in the lowest `table_bits`, above it the slot's number among those of its
symbol, above that the symbol, signed. The lowest symbol is the escape: a 16-bit word of its own follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

STATE_BITS, WORD_BITS = 12, 16
"""A lane's state is between 2^12 and 2^28: below, it takes a word."""
TABLE_BITS, RAW_BITS, MOST_MODELS = (6, 7, 8, 9, 10, 11), (0, 1, 2, 3), (1, 2, 4, 8, 16)
"""What is tried. At most STATE_BITS bits of the state may be read at a time."""
PAIR_TABLE_BITS = 11
PAIR_BITS = 16 - PAIR_TABLE_BITS
"""Bits of each code of a symbol that is a pair."""
_SAMPLE = 1 << 20
"""Entries from which models are chosen."""
ESCAPE_SHARE = 0.1
"""A symbol that would have fewer slots than this is cheaper as an escape."""
LIMIT = 1 << 11
"""Codes beyond it are escapes."""

Codes = NDArray[np.integer]
Classes = NDArray[np.uint8]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Classes of rows (r,) and columns (n,), and the frequencies of each model: (models, symbols)."""

    table_bits: int
    raw_bits: int
    rows: Classes
    columns: Classes
    low: int
    """The first symbol of the table; the one after the last is the escape."""
    frequencies: Counts

    @property
    def has_escapes(self) -> bool:
        return bool(self.frequencies[:, -1].any())

    def entries(self) -> NDArray[np.int32]:
        """What the decoder looks up: (models, 2^table_bits)."""
        models, symbols = self.frequencies.shape
        values = np.append(self.low + np.arange(symbols - 1), escape(self.table_bits))
        each = self.frequencies.ravel()
        symbol = np.repeat(np.tile(values, models), each)
        first = np.repeat(np.cumsum(each) - each, each)
        within = np.arange(len(symbol)) - first
        entries = symbol << 2 * self.table_bits | within << self.table_bits | np.repeat(each, each) - 1
        return entries.astype(np.int32).reshape(models, -1)

    def joint(self, codes: Codes) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The place in `frequencies` of every code of (r, n), and which of them are escapes."""
        symbols = self.frequencies.shape[1]
        number = (codes >> self.raw_bits).astype(np.int32) - np.int32(self.low)
        outside = (number < 0) | (number >= symbols - 1)
        number[outside] = symbols - 1
        if len(self.frequencies) > 1:
            number += (self.rows[:, None].astype(np.int32) + self.columns) * np.int32(symbols)
        is_escape = outside | (self.frequencies.ravel()[number] == 0)
        number[is_escape] += symbols - 1 - number[is_escape] % symbols
        return number, is_escape


def escape(table_bits: int) -> int:
    """The symbol of an escape: the lowest that an entry can hold."""
    return -(1 << 31 - 2 * table_bits)


def fit_models(codes: Codes) -> tuple[Models, float]:
    """The models with which a matrix (r, n) of at least one code takes fewest bytes, and these, estimated."""
    step = min(max(1, codes.size // _SAMPLE), len(codes))
    taken = codes[::step]
    scale = codes.size / taken.size
    best: tuple[float, int, int, tuple[Classes, Classes]] | None = None
    for rows, columns in _classings(codes, step):
        low, counts = _counts(taken, rows[::step], columns)
        side = len(rows) + len(columns) if len(counts) > 1 else 0
        for table_bits, raw_bits in product(TABLE_BITS, RAW_BITS):
            if table_bits + raw_bits > STATE_BITS:
                continue
            message = _message_bits(*_merged(low, counts, raw_bits), table_bits)
            message = scale * (message + raw_bits * taken.size) / 8
            total = message + (4 * len(counts) << table_bits) + side
            if best is None or total < best[0]:
                best = total, table_bits, raw_bits, (rows, columns)
    assert best is not None
    total, table_bits, raw_bits, (rows, columns) = best
    low, counts = _merged(*_counts(codes, rows, columns), raw_bits)
    return Models(table_bits, raw_bits, rows, columns, *_frequencies(low, counts, table_bits)), total


def fit_pairs(symbols: Codes) -> tuple[Models, float]:
    """One model for symbols that are pairs, and the bytes of the codes, estimated."""
    rows, columns = np.zeros(len(symbols), np.uint8), np.zeros(symbols.shape[1], np.uint8)
    low, counts = _counts(symbols, rows, columns)
    total = _message_bits(low, counts, PAIR_TABLE_BITS) / 8 + (4 << PAIR_TABLE_BITS)
    return Models(PAIR_TABLE_BITS, 0, rows, columns, *_frequencies(low, counts, PAIR_TABLE_BITS)), total


def _classings(codes: Codes, step: int) -> Iterator[tuple[Classes, Classes]]:
    """One class; classes of columns; classes of rows and columns: by logarithms of mean magnitudes."""
    rows, columns = np.zeros(len(codes), np.uint8), np.zeros(codes.shape[1], np.uint8)
    yield rows, columns
    across = min(max(1, codes.size // _SAMPLE), codes.shape[1])
    of_columns = np.log2(_sizes(codes[::step]).mean(0))
    for most in MOST_MODELS[1:]:
        yield rows, _classes(of_columns, most)
    of_rows = np.log2((_sizes(codes[:, ::across]) / np.exp2(of_columns[::across])).mean(1))
    of_columns = np.log2((_sizes(codes[::step]) / np.exp2(of_rows[::step, None])).mean(0))
    for most in MOST_MODELS[2:]:
        width = max(float(np.ptp(of_rows) + np.ptp(of_columns)) / (most - 1), 1e-6)
        yield (
            np.round((of_rows - of_rows.min()) / width).astype(np.uint8),
            np.round((of_columns - of_columns.min()) / width).astype(np.uint8),
        )


def _sizes(codes: Codes) -> NDArray[np.float32]:
    return np.abs(codes.astype(np.float32)) + np.float32(0.02)


def _classes(values: NDArray[np.float32], most: int) -> Classes:
    """Up to `most` classes of equal width."""
    width = max(float(np.ptp(values)) / most, 1e-6)
    return np.minimum((values - values.min()) / width, most - 1).astype(np.uint8)


def _counts(codes: Codes, rows: Classes, columns: Classes) -> tuple[int, Counts]:
    """The lowest code, and how often each model has each code from it on, and codes outside the limits."""
    low, high = max(int(codes.min()), -LIMIT), min(int(codes.max()), LIMIT - 1)
    size = high - low + 2
    number = codes.astype(np.int32) - low
    number[(number < 0) | (number >= size - 1)] = size - 1
    models = int(rows.max()) + int(columns.max()) + 1
    if models > 1:
        number += (rows[:, None].astype(np.int32) + columns) * np.int32(size)
    return low, np.bincount(number.ravel(), minlength=models * size).reshape(models, size)


def _merged(low: int, counts: Counts, raw_bits: int) -> tuple[int, Counts]:
    """Counts of codes without their lowest bits."""
    first = low >> raw_bits
    before = low - (first << raw_bits)
    after = -(before + counts.shape[1] - 1) % (1 << raw_bits)
    padded = np.pad(counts[:, :-1], ((0, 0), (before, after)))
    return first, np.append(padded.reshape(len(counts), -1, 1 << raw_bits).sum(2), counts[:, -1:], 1)


def _with_escapes(low: int, counts: Counts, table_bits: int) -> Counts:
    """Counts of the symbols that are worth a slot, and of all the others as escapes."""
    symbols = low + np.arange(counts.shape[1] - 1)
    fits = (symbols > escape(table_bits)) & (symbols < -escape(table_bits))
    kept = (counts[:, :-1] << table_bits > ESCAPE_SHARE * counts.sum(1, keepdims=True)) & fits
    escapes = counts[:, -1:] + np.where(kept, 0, counts[:, :-1]).sum(1, keepdims=True)
    return np.append(np.where(kept, counts[:, :-1], 0), escapes, 1)


def _message_bits(low: int, counts: Counts, table_bits: int) -> float:
    """Bits of the symbols, without raw bits, with frequencies that are nearly those of `_frequencies`."""
    counts = _with_escapes(low, counts, table_bits)
    if int(np.count_nonzero(counts, 1).max()) > 1 << table_bits:
        return np.inf
    total = np.maximum(counts.sum(1, keepdims=True), 1)
    slots = np.where(counts > 0, np.maximum(counts / total * (1 << table_bits), 1), 0)
    share = slots / np.maximum(slots.sum(1, keepdims=True), 1)
    bits = -(counts * np.log2(np.where(counts > 0, share, 1))).sum()
    return float(bits + WORD_BITS * counts[:, -1].sum())


def _frequencies(low: int, counts: Counts, table_bits: int) -> tuple[int, Counts]:
    """The first symbol, and each model's frequencies with that of the escape: each row sums to 2^table_bits."""
    counts = _with_escapes(low, counts, table_bits)
    used = np.flatnonzero(counts[:, :-1].any(0))
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 1)
    counts = np.append(counts[:, first:last], counts[:, -1:], 1)
    counts[counts.sum(1) == 0, 0] = 1  # a model without entries
    return low + first, np.stack([_normalized(each, 1 << table_bits) for each in counts])


def _normalized(counts: Counts, total: int) -> Counts:
    """Frequencies that sum to `total`, at least 1 where there is a count."""
    slots = np.where(counts > 0, np.maximum(np.round(counts * (total / counts.sum())), 1), 0).astype(np.int64)
    while extra := int(slots.sum()) - total:
        # Where a slot more or less changes the length least.
        free = slots > 1 if extra > 0 else counts > 0
        other = np.maximum(slots - np.sign(extra), 1)
        loss = np.where(free, counts * np.log2(np.maximum(slots, 1) / other), np.inf)
        moved = min(max(abs(extra) // 4, 1), int(free.sum()))
        slots[np.argsort(loss, kind="stable")[:moved]] -= np.sign(extra)
    return slots
