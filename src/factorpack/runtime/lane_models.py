"""Which model codes which entry of a matrix in lanes, and the tables that a decoder looks up.

As in a file, the class of an entry is its row's class plus its column's, and each class has its own
frequencies. There are fewer classes than in a file, since each one's table takes memory.

A symbol is a code without its lowest `raw_bits`, which are nearly uniform where codes are wide; or it is a
pair of codes. It is coded by a tabled variant of asymmetric numeral systems: a state is one of 2^table_bits
slots, and each symbol has as many slots as its frequency, spread over all. The entry of a slot is an integer of
32 bits: how many bits are read next (the lowest 6), the field (12 bits), and above these the number that the bits
are appended to, which gives the next state. The field is the code plus 2048, with zeros for raw bits; or both
codes of a pair plus 32, in six bits each. A code so rare that it has no slot is coded as zero, and patched
afterwards.

Models are chosen from counts and sums of integers, made where the codes are, so that a GPU and a CPU choose the same.

A large matrix has all entries of its tables. In a small one these would take more than a percent of all bytes:
there a slot has the number of its symbol, in a byte, which is enough to make the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TABLE_BITS, RAW_BITS, MOST_MODELS = (6, 7, 8, 9, 10, 11), (0, 1, 2, 3), (1, 2, 4, 8, 16)
"""What is tried."""
PAIR_TABLE_BITS, PAIR_BITS = (10, 11, 12, 13), 6
"""For symbols that are pairs: bits of the table, and of each code."""
SMALL_TABLE = 1.002
"""What a smaller table may cost: more blocks have their tables in shared memory at a time."""
COUNT_BITS, FIELD_BITS = 6, 12
"""Of an entry, from the lowest bit: the bits to be read, and the field."""
MOST_SLOTS = 1 << 14
"""Of all models together: their entries are in the memory that the threads of a block share."""
LARGE = 1 << 22
"""Codes of a matrix whose table has an entry for every slot."""
MOST_NUMBERS = 256
"""Symbols that a byte tells apart."""
LIMIT = 1 << FIELD_BITS - 1
"""Codes from -2048 to 2047 can be in lanes."""
PATCH_BITS = 32
_PATCH_SHARE = 0.06
"""A symbol that would have fewer slots than this is cheaper as a patch."""
_LEAST_SIZE, _WEIGHT_UNIT = 0.02, 1 << 20
"""What is added to magnitudes, whose logarithms are taken, and what magnitudes are weighted in units of."""
_SAMPLE, _SAMPLE_OF_LARGE = 1 << 20, 1 << 18
"""Entries from which models are chosen. Those of a large matrix differ less, and take longer."""

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
    """The first symbol of the table."""
    frequencies: Counts

    is_indirect: bool
    """Whether a slot has the number of its symbol, and not its entry."""
    is_pair: bool = False

    def numbers(self) -> NDArray[np.uint8 | np.uint16]:
        """The number of every slot's symbol, counted from the first: (models, slots)."""
        kind = np.uint8 if self.frequencies.shape[1] <= MOST_NUMBERS else np.uint16
        symbols, slots = np.arange(self.frequencies.shape[1], dtype=kind), 1 << self.table_bits
        found = np.empty((len(self.frequencies), slots), kind)
        spread = np.arange(slots) * (slots // 2 + slots // 8 + 3) % slots
        for own, frequencies in zip(found, self.frequencies, strict=True):
            own[spread] = np.repeat(symbols, frequencies)
        return found

    def table(self) -> NDArray[np.uint8]:
        """What the decoder looks up, by slot: entries, or the numbers of symbols."""
        numbers = self.numbers()
        if self.is_indirect:
            return numbers.astype(np.uint8).ravel()
        return (
            entries_of(numbers, self.table_bits, self.raw_bits, self.low, self.is_pair).view(np.uint8).ravel()
        )

    def slots(self) -> NDArray[np.int32]:
        """Slots in the order of their symbols, model after model: (models x slots,)."""
        return np.argsort(self.numbers(), 1, kind="stable").astype(np.int32).ravel()

    def joint(self, symbols: Codes) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The place in `frequencies` of every symbol of (r, n), and which of them must be patched."""
        size = self.frequencies.shape[1]
        number = symbols.astype(np.int32) - np.int32(self.low)
        first = np.zeros_like(number)
        if len(self.frequencies) > 1:
            first = (self.rows[:, None].astype(np.int32) + self.columns) * np.int32(size)
        outside = (number < 0) | (number >= size)
        number[outside] = 0
        is_rare = outside | (self.frequencies.ravel()[first + number] == 0)
        number[is_rare] = -self.low
        return first + number, is_rare


def entries_of(
    numbers: NDArray[np.uint8 | np.uint16], table_bits: int, raw_bits: int, low: int, is_pair: bool
) -> NDArray[np.uint32]:
    """The entries of slots with these symbols, (models, slots). Slots of a symbol follow each other in order."""
    order = np.argsort(numbers, 1, kind="stable")
    entries = np.empty(numbers.shape, np.uint32)
    for own, slots, symbols in zip(entries, order, numbers, strict=True):
        counts = np.bincount(symbols)
        before = np.repeat(np.cumsum(counts) - counts - counts, counts)
        base = np.arange(len(slots)) - before  # from the symbol's frequency to less than twice as much
        read = table_bits - np.floor(np.log2(base)).astype(np.int64)
        field = (symbols[slots].astype(np.int64) + low << raw_bits) + LIMIT
        field ^= (1 << PAIR_BITS - 1) * is_pair
        own[slots] = base << COUNT_BITS + FIELD_BITS | field << COUNT_BITS | read
    return entries


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """How a matrix is coded in fewest bytes, and these, estimated."""

    size: float
    table_bits: int
    raw_bits: int
    rows: Classes
    columns: Classes

    def fit(self, codes: Tensor, low: int, high: int) -> Models:
        """The models of the matrix that this was chosen for."""
        is_indirect, low, symbols = codes.numel() < LARGE, *_symbols(low, high)
        every = 1 if is_indirect else max(1, codes.numel() // _SAMPLE)
        (counts,) = _counts(codes[::every], low, symbols, [(self.rows[::every], self.columns)])
        low, frequencies = _frequencies(*_merged(low, counts, self.raw_bits), self.table_bits)
        is_indirect = is_indirect and frequencies.shape[1] <= MOST_NUMBERS
        return Models(self.table_bits, self.raw_bits, self.rows, self.columns, low, frequencies, is_indirect)


def choose_models(codes: Tensor, low: int, high: int) -> Choice:
    """The classes and tables with which a matrix (r, n) of codes from `low` to `high` takes fewest bytes."""
    is_indirect, low, symbols = codes.numel() < LARGE, *_symbols(low, high)
    step = min(max(1, codes.numel() // (_SAMPLE if is_indirect else _SAMPLE_OF_LARGE)), len(codes))
    # Rows that classes are not made from: other rows would show gains that are not there.
    among = slice(step // 2, None, step)
    taken = codes[among]
    scale = codes.numel() / taken.numel() / 8
    classings = _classings(codes, step)
    tried = _counts(taken, low, symbols, [(rows[among], columns) for rows, columns in classings])
    best: Choice | None = None
    for (rows, columns), counts in zip(classings, tried, strict=True):
        side = (len(rows) + len(columns)) / 2 if len(counts) > 1 else 0
        # No tables are worth it that are much smaller than those that were best. That leaves one way or two.
        if best is not None:
            tables = len(counts) << best.table_bits - 2 + 2 * (not is_indirect)
            if scale * _entropy_bits(counts) + tables + side >= best.size:
                continue
        for raw_bits in RAW_BITS:
            first, merged = _merged(low, counts, raw_bits)
            raw = raw_bits * taken.numel()
            if best is not None:
                tables = _table_bytes(merged, best.table_bits - 2, is_indirect)
                if scale * (_entropy_bits(merged) + raw) + tables + side >= best.size:
                    continue
            bits = [each for each in TABLE_BITS if len(counts) << each <= MOST_SLOTS]
            for table_bits, message in zip(bits, _message_bits(first, merged, bits), strict=True):
                size = scale * (message + raw) + _table_bytes(merged, table_bits, is_indirect) + side
                if best is None or size < best.size:
                    best = Choice(size, table_bits, raw_bits, rows, columns)
    assert best is not None
    return best


def _symbols(low: int, high: int) -> tuple[int, int]:
    """The first of the symbols of codes from `low` to `high`, which have 0 among them, and how many there are."""
    return min(low, 0), max(high, 0) - min(low, 0) + 1


def _table_bytes(counts: Counts, table_bits: int, is_indirect: bool) -> int:
    """What `Models.table` takes."""
    has_bytes = is_indirect and counts.shape[1] <= MOST_NUMBERS
    return len(counts) << table_bits + (0 if has_bytes else 2)


def fit_pairs(codes: Tensor, most: float) -> Models | None:
    """One model for pairs of codes, of (r, n); None where these would take more than `most` bytes."""
    size = codes.numel() // 2
    rows, columns = np.zeros(len(codes), np.uint8), np.zeros(codes.shape[1] // 2, np.uint8)
    every = max(1, size // _SAMPLE)
    low = -1 << 2 * PAIR_BITS - 1
    (counts,) = _counts(pairs_of(codes[::every]), low, 1 - 2 * low, [(rows[::every], columns)])
    scale = size / float(counts.sum())
    low, counts = _trimmed(low, counts)

    messages = zip(PAIR_TABLE_BITS, _message_bits(low, counts, PAIR_TABLE_BITS), strict=True)
    sizes = {bits: scale * message / 8 + (4 << bits) for bits, message in messages}
    bits = next(bits for bits, size in sizes.items() if size <= SMALL_TABLE * min(sizes.values()))
    if sizes[bits] > most:
        return None
    return Models(bits, 0, rows, columns, *_frequencies(low, counts, bits), False, True)


def pairs_of(codes: Tensor) -> Tensor:
    """Neighbouring codes as symbols; those beyond what a symbol holds get one that no table has."""
    first, second = codes[:, ::2].to(torch.int16), codes[:, 1::2].to(torch.int16)
    half = 1 << PAIR_BITS - 1
    inside = (first >= -half) & (first < half) & (second >= -half) & (second < half)
    return torch.where(inside, first << PAIR_BITS | second & (2 * half - 1), half << PAIR_BITS)


def _trimmed(low: int, counts: Counts) -> tuple[int, Counts]:
    """Counts from the first symbol that occurs, or 0, to the last."""
    used = np.flatnonzero(counts.any(0))
    first, last = min(int(used[0]), -low), max(int(used[-1]), -low)
    return low + first, counts[:, first : last + 1]


def _classings(codes: Tensor, step: int) -> list[tuple[Classes, Classes]]:
    """One class; classes of columns; classes of rows and columns: by logarithms of mean magnitudes."""
    rows, columns = np.zeros(len(codes), np.uint8), np.zeros(codes.shape[1], np.uint8)
    across = min(max(1, codes.numel() // _SAMPLE), codes.shape[1])
    some = codes[::step]
    of_columns = _log_sizes(some, np.zeros(len(some)), 0)
    found = [(rows, columns), *((rows, _classes(of_columns, most)) for most in MOST_MODELS[1:])]
    of_rows = _log_sizes(codes[:, ::across], of_columns[::across], 1)
    of_columns = _log_sizes(some, of_rows[::step], 0)
    for most in MOST_MODELS[2:]:
        width = max(float(np.ptp(of_rows) + np.ptp(of_columns)) / (most - 1), 1e-6)
        of_both = ((each - each.min()) / width for each in (of_rows, of_columns))
        by_row, by_column = (np.round(each).astype(np.uint8) for each in of_both)
        found.append((by_row, by_column))
    return found


def _log_sizes(codes: Tensor, others: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Logarithms of mean magnitudes along an axis of (r, n), whose entries have magnitudes 2^others: (n,) or (r,)."""
    weights = np.round(np.exp2(-others) * _WEIGHT_UNIT).astype(np.int64)
    shape = (-1, 1) if axis == 0 else (1, -1)
    weighted = codes.int().abs() * torch.from_numpy(weights).to(codes.device).view(shape)
    means: NDArray[np.float64] = weighted.sum(axis).cpu().numpy() / weights.sum()
    return np.log2(means + _LEAST_SIZE)


def _classes(values: NDArray[np.float64], most: int) -> Classes:
    """Up to `most` classes of equal width."""
    width = max(float(np.ptp(values)) / most, 1e-6)
    found: Classes = np.minimum((values - values.min()) / width, most - 1).astype(np.uint8)
    return found


def _counts(codes: Tensor, low: int, symbols: int, classings: list[tuple[Classes, Classes]]) -> list[Counts]:
    """How often each model of each classing has each of the `symbols` codes from `low` on."""
    rows, columns = (np.stack(each) for each in zip(*classings, strict=True))
    models = rows.max(1).astype(int) + columns.max(1) + 1
    ends = np.cumsum(models)
    first = (rows + (ends - models)[:, None]).astype(np.int32)
    joint = (
        torch.from_numpy(first).to(codes.device)[:, :, None]
        + torch.from_numpy(columns).to(codes.device)[:, None]
    )
    joint.mul_(symbols).add_(codes.int() - low)
    counts = torch.bincount(joint.view(-1), minlength=int(ends[-1]) * symbols).cpu().numpy()
    return np.split(counts.reshape(-1, symbols), ends[:-1])


def _merged(low: int, counts: Counts, raw_bits: int) -> tuple[int, Counts]:
    """Counts of codes without their lowest bits."""
    if raw_bits == 0:
        return low, counts
    first = low >> raw_bits
    before, size = low - (first << raw_bits), counts.shape[1]
    padded = np.zeros((len(counts), before + size + -(before + size) % (1 << raw_bits)), np.int64)
    padded[:, before : before + size] = counts
    return first, padded.reshape(len(counts), -1, 1 << raw_bits).sum(2)


def _patched(low: int, counts: Counts, table_bits: NDArray[np.int64]) -> tuple[Counts, Counts]:
    """For each table, counts in which rare symbols are zeros, at least one in each model; and how many are rare."""
    fits = low + np.arange(counts.shape[1]) < LIMIT
    kept = (counts << table_bits[:, None, None] > _PATCH_SHARE * counts.sum(1, keepdims=True)) & fits
    kept[..., -low] = True
    found = np.where(kept, counts, 0)
    rare = counts.sum(1) - found.sum(2)
    found[..., -low] = np.maximum(found[..., -low] + rare, 1)
    return found, rare.sum(1)


def _message_bits(low: int, counts: Counts, table_bits: Sequence[int]) -> list[float]:
    """Bits of the symbols for each table, without raw bits, with frequencies nearly those of `_frequencies`."""
    bits = np.array(table_bits)
    counts, rare = _patched(low, counts, bits)
    slots = counts / counts.sum(2, keepdims=True) * (1 << bits)[:, None, None]
    occurs = counts > 0
    slots = np.where(occurs, np.maximum(slots, 1), 0)
    share = slots / slots.sum(2, keepdims=True)
    message = PATCH_BITS * rare - (counts * np.log2(np.where(occurs, share, 1))).sum((1, 2))
    fits = occurs.sum(2).max(1) <= 1 << bits
    found: list[float] = np.where(fits, message, np.inf).tolist()
    return found


def _entropy_bits(counts: Counts) -> float:
    """Bits that no table does without: those of a rare symbol are fewer than its patch has."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return -float((counts * np.log2(np.where(counts > 0, share, 1))).sum())


def _frequencies(low: int, counts: Counts, table_bits: int) -> tuple[int, Counts]:
    """The first symbol, and each model's frequencies from it on: each row sums to 2^table_bits."""
    counts = _patched(low, counts, np.array([table_bits]))[0][0]
    used = np.flatnonzero(counts.any(0))
    counts = counts[:, used[0] : used[-1] + 1]
    return low + int(used[0]), np.stack([_normalized(each, 1 << table_bits) for each in counts])


def _normalized(counts: Counts, total: int) -> Counts:
    """Frequencies that sum to `total`, at least 1 where there is a count."""
    slots = np.where(counts > 0, np.maximum(np.round(counts * (total / counts.sum())), 1), 0).astype(np.int64)
    while extra := int(slots.sum()) - total:
        # Where a slot more or less changes the length least.
        free = slots > 1 if extra > 0 else counts > 0
        other = np.maximum(slots - np.sign(extra), 1)
        loss = np.where(free, counts * np.log2(np.maximum(slots, 1) / other), np.inf)
        moved = min((abs(extra) + 1) // 2, int(free.sum()))
        slots[np.argsort(loss, kind="stable")[:moved]] -= np.sign(extra)
    return slots
