"""Codes in lanes: entropy-coded in memory so that thousands of threads can decode them.

A file's streams are read from front to back. Here each column of a matrix, or pair of columns, is in segments of
some hundred rows a lane with a small stream of its own. A thread per lane decodes down its column, so that
neighbouring threads write neighbouring codes, and a row's scale or class is the same for all of them.

A lane's stream is a string of bits (lane_models.py) in words of 32: a one marks the first bit, and the last bit is
the last of a word. 32 neighbouring lanes are a group, which has its words in the order in which they are taken: at
first three of each lane, then, before every few steps, one of each lane that has used one. So threads that run
side by side read neighbouring words. A group's patches are codes too rare for the tables: 32 bits for each, the row
within the segment (12), the column within the group (8) and the code (12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factorpack.errors import WeightError
from factorpack.runtime.lane_models import (
    LIMIT,
    PAIR_BITS,
    Codes,
    Models,
    fit_models,
    fit_pairs,
)

GROUP = 32
"""Lanes of a group, except the last of a row of groups: the threads of a warp."""
FIRST_WORDS = 3
"""Words that a lane has ahead, so that it need not wait for memory."""
MOST_STEPS = 4
LANE_BITS = {0: 3200, 1 << 22: 1300, 1 << 25: 3200, 1 << 27: 4000}
"""By least number of codes: bits of a lane, about. Short lanes make many, to be decoded at a time; but each takes
32 bits more than its codes. Small matrices are decoded fast enough anyway, and large ones have enough lanes."""
LONGEST_SEGMENT = 4096
"""Rows of a lane that a patch can count."""
LEAST_COLUMNS, LEAST_LANES = 64, 32
"""A narrower matrix, or a shorter one than a lane, is cut into other rows, of this many codes at least."""
LANE_BYTES = 4.2
"""What a lane takes beyond its codes, about."""
PAIR_MARGIN = {0: 1.0, 1 << 22: 1.015}
"""By least number of codes: what pairs may take beside single codes. They are decoded twice as fast."""
_RUNS, _RUN = 64, 4096
"""Runs of codes, whose entropy is about that of all, and the length of a run."""
_LANES_AT_A_TIME = 1 << 14
"""Lanes that are encoded at a time, so that their states stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Where everything is in the bytes of `pack_lanes`. Codes are `count` in rows of `columns`."""

    count: int
    columns: int
    segment: int
    """Rows of a lane; the last segment may have fewer."""
    table_bits: int
    raw_bits: int
    models: int
    low: int
    """The first symbol of the tables."""
    has_patches: bool
    is_pair: bool
    """Whether a symbol is two neighbouring codes of a row, so that a lane has two columns."""
    is_indirect: bool
    """Whether the tables have the number of every slot's symbol, in a byte, and not its entry."""
    states_at: int
    """Bytes before the lanes' first states, 16 bits each. Before them are all words."""
    groups_at: int
    """Bytes before two 32-bit integers per group: the words and the patches before its own; and two for all."""
    table_at: int
    patches_at: int
    classes_at: int
    """Bytes before the classes of rows and columns, four bits each. With one model there are none."""

    @property
    def rows(self) -> int:
        return -(-self.count // self.columns)

    @property
    def segments(self) -> int:
        return -(-self.rows // self.segment)

    @property
    def groups(self) -> int:
        """Groups of one segment."""
        return -(-self.lanes // GROUP)

    @property
    def lanes(self) -> int:
        """Lanes of one segment."""
        return self.columns // 2 if self.is_pair else self.columns

    @property
    def steps(self) -> int:
        """Steps between the times at which lanes may take a word."""
        return steps_between(self.table_bits, self.raw_bits)


def fits_lanes(low: int, high: int) -> bool:
    """Whether codes from `low` to `high` can be in lanes."""
    return low >= -LIMIT and high < LIMIT


def pack_lanes(codes: Codes, columns: int, unit: int = 1, free: bool = True) -> tuple[Tensor, LaneLayout]:
    """Codes in memory order, at least one, in rows of `columns` -> bytes, and where everything is in them.

    Where the rows are `free`, they may be cut otherwise, to have lanes of some length. `unit` neighbouring
    codes are of different kinds, like the codes of a tile.
    """
    flat = codes.reshape(-1)
    if not fits_lanes(int(flat.min()), int(flat.max())):
        raise WeightError(f"codes {flat.min()} to {flat.max()}, lanes can have {-LIMIT} to {LIMIT - 1}")
    wanted = _by_size(LANE_BITS, flat.size) / max(_entropy(flat), 0.1)
    matrix = _in_rows(flat, columns)
    models, size = fit_models(matrix)
    if free and (columns < LEAST_COLUMNS or len(matrix) < wanted):
        narrow = -(-max(round(flat.size / wanted), min(flat.size, LEAST_LANES)) // unit) * unit
        narrow_matrix = _in_rows(flat, narrow)
        narrow_models, narrow_size = fit_models(narrow_matrix)
        if narrow_size + LANE_BYTES * narrow < size + LANE_BYTES * columns:
            columns, matrix, models, size = narrow, narrow_matrix, narrow_models, narrow_size
    symbols: Codes = matrix >> models.raw_bits
    if columns % 2 == 0:
        pairs = _pairs(matrix)
        paired = fit_pairs(pairs, _by_size(PAIR_MARGIN, flat.size) * size)
        if paired is not None:
            symbols, models = pairs, paired
    segment = -(-len(matrix) // max(1, round(len(matrix) * (1 + models.is_pair) / wanted)))
    segment = min(segment, LONGEST_SEGMENT)
    return _joined(flat.size, columns, segment, models, _encode(symbols, matrix, models, segment))


def _by_size(values: Mapping[int, float], codes: int) -> float:
    """The value for so many codes."""
    return values[max(size for size in values if size <= codes)]


def _in_rows(codes: Codes, columns: int) -> Codes:
    """As a matrix, the last row padded with zeros."""
    rows = -(-codes.size // columns)
    if rows * columns == codes.size:
        return codes.reshape(rows, columns)
    return np.append(codes, np.zeros(rows * columns - codes.size, codes.dtype)).reshape(rows, columns)


def _entropy(codes: Codes) -> float:
    """Bits per code, with one model, about."""
    some = codes
    if codes.size > _RUNS * _RUN:  # runs: every n-th code could be of one kind
        starts = np.linspace(0, codes.size - _RUN, _RUNS).astype(np.int64)
        some = codes[starts[:, None] + np.arange(_RUN)].ravel()
    counts = np.bincount(some.astype(np.int64) - int(some.min()))
    share = counts[counts > 0] / some.size
    return float(-(share * np.log2(share)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    words: NDArray[np.uint32]
    states: NDArray[np.uint16]
    groups: NDArray[np.int32]
    patches: NDArray[np.int32]


def _joined(
    count: int, columns: int, segment: int, models: Models, encoded: _Encoded
) -> tuple[Tensor, LaneLayout]:
    """All arrays in one, each beginning at a multiple of 16 bytes."""
    nothing = np.empty(0, np.uint8)
    sections: list[NDArray[Any]] = [
        encoded.words,
        encoded.states,
        encoded.groups,
        models.table(),
        encoded.patches,
        _by_halves(np.concatenate([models.rows, models.columns]) if len(models.frequencies) > 1 else nothing),
    ]
    starts = np.cumsum([0, *(-(-each.nbytes // 16) * 16 for each in sections)]).tolist()
    packed = np.zeros(starts[-1], np.uint8)
    for start, each in zip(starts, sections, strict=False):
        packed[start : start + each.nbytes] = each.view(np.uint8)
    layout = LaneLayout(
        count,
        columns,
        segment,
        models.table_bits,
        models.raw_bits,
        len(models.frequencies),
        models.low,
        len(encoded.patches) > 0,
        models.is_pair,
        models.is_indirect,
        *starts[1:6],
    )
    return torch.from_numpy(packed), layout


def _by_halves(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two numbers of four bits in each byte, the first in the lower half."""
    even = np.append(numbers, np.zeros(len(numbers) % 2, np.uint8)).reshape(-1, 2)
    return (even[:, 0] | even[:, 1] << 4).astype(np.uint8)


def _pairs(codes: Codes) -> Codes:
    """Neighbouring codes as symbols; those beyond what a symbol holds get one that no table has."""
    first, second = codes[:, ::2].astype(np.int16), codes[:, 1::2].astype(np.int16)
    half = 1 << PAIR_BITS - 1
    inside = (first >= -half) & (first < half) & (second >= -half) & (second < half)
    return np.where(inside, first << PAIR_BITS | second & (2 * half - 1), half << PAIR_BITS)


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """The words of some lanes: (most words, lanes), in the order of writing; how many; and the first states.

    `left` is, for every time that lanes may take words, how many they still use from there on: (times, lanes).
    """

    words: NDArray[np.uint32]
    counts: NDArray[np.int64]
    states: NDArray[np.int32]
    left: NDArray[np.int16]


def steps_between(table_bits: int, raw_bits: int) -> int:
    """Steps between the times at which lanes may take a word: they use no more than one meanwhile."""
    return min(32 // (table_bits + raw_bits), MOST_STEPS)


def _encode(symbols: Codes, codes: Codes, models: Models, segment: int) -> _Encoded:
    """All lanes, some columns at a time."""
    rows, columns = symbols.shape
    segments, across = -(-rows // segment), -(-columns // GROUP)
    width = max(_LANES_AT_A_TIME // segments // GROUP, 1) * GROUP
    states = np.empty((segments, columns), np.uint16)
    lengths = np.empty((segments, across), np.int64)
    words: list[list[NDArray[np.uint32]]] = [[] for _ in range(segments)]
    is_rare = np.empty(symbols.shape, np.bool_)
    for left in range(0, columns, width):
        own = slice(left, left + width)
        part = replace(models, columns=models.columns[own])
        joint, is_rare[:, own] = part.joint(symbols[:, own])
        raw = np.where(is_rare[:, own], 0, codes[:, own]) if models.raw_bits else None
        stream = _encode_lanes(joint, raw, part, segment)
        each = min(width, columns - left)
        states[:, own] = stream.states.reshape(segments, each)
        for row in range(segments):
            lanes, own_rows = slice(row * each, (row + 1) * each), min(segment, rows - row * segment)
            times = -(-own_rows // steps_between(models.table_bits, models.raw_bits))
            laid, lengths[row, left // GROUP : -(-(left + each) // GROUP)] = _lay_out(stream, lanes, times)
            words[row].append(laid)
    patches, counts = _patches(codes, is_rare.repeat(2, 1) if models.is_pair else is_rare, segment, models)
    first = np.stack([np.cumsum(lengths) - lengths.ravel(), np.cumsum(counts) - counts], 1)
    groups = np.append(first.ravel(), [lengths.sum(), len(patches)]).astype(np.int32)
    return _Encoded(np.concatenate([*chain.from_iterable(words)]), states.reshape(-1), groups, patches)


def _patches(
    codes: Codes, is_rare: NDArray[np.bool_], segment: int, models: Models
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The patches of all groups, and how many each group has."""
    each = GROUP * (1 + models.is_pair)
    row, column = np.nonzero(is_rare & (codes != 0))
    across = -(-codes.shape[1] // each)
    group = row // segment * across + column // each
    order = np.argsort(group, kind="stable")
    code = codes[row, column].astype(np.int64) & 0xFFF
    patch = (row % segment << 20 | column % each << 12 | code)[order]
    return patch.astype(np.uint32).view(np.int32), np.bincount(
        group, minlength=-(-len(codes) // segment) * across
    )


def _encode_lanes(joint: NDArray[np.int32], raw: Codes | None, models: Models, segment: int) -> _Stream:
    """All lanes of some columns at the same time, from the last row to the first, and from their last bit."""
    rows, columns = joint.shape
    segments, raw_bits, bits = -(-rows // segment), models.raw_bits, models.table_bits
    frequency = models.frequencies.ravel().astype(np.int32)
    slots, first = models.slots(), np.cumsum(frequency) - frequency
    # As FSE does: (state + `shifts`) >> 16 bits are written, after which the state has the symbol's range.
    most = bits - np.floor(np.log2(np.maximum(frequency - 1, 1))).astype(np.int32)
    most[frequency == 1] = bits
    shifts, base = (most << 16) - (frequency << most), (first - frequency).astype(np.int32)
    lanes, times = segments * columns, steps_between(bits, raw_bits)
    stream = _Stream(
        np.empty((segment * (bits + raw_bits) // 32 + 2, lanes), np.uint32),
        np.zeros(lanes, np.int64),
        np.zeros(lanes, np.int32),
        np.zeros((-(-min(segment, rows) // times), lanes), np.int16),
    )
    filled, count = np.zeros(lanes, np.uint64), np.zeros(lanes, np.int32)
    for step in reversed(range(min(segment, rows))):
        own = joint[step::segment].reshape(-1)
        some = slice(len(own))
        if raw is not None:
            low = raw[step::segment].reshape(-1).astype(np.int64) & ((1 << raw_bits) - 1)
            filled[some] |= low.astype(np.uint64) << count[some].astype(np.uint64)
            count[some] += raw_bits
        state = stream.states[some] + (1 << bits)
        number = (state + shifts.take(own)) >> 16
        filled[some] |= (state & ((1 << number) - 1)).astype(np.uint64) << count[some].astype(np.uint64)
        count[some] += number
        stream.states[some] = slots.take(base.take(own) + (state >> number))
        full = np.flatnonzero(count[some] >= 32)
        _write(stream, full, filled[full])
        filled[full] >>= np.uint64(32)
        count[full] -= 32
        if step % times == 0:
            stream.left[step // times, some] = stream.counts[some] + (count[some] > 0)
    # A one before the first bit marks it.
    _write(stream, np.arange(lanes), filled | np.uint64(1) << count.astype(np.uint64))
    return stream


def _write(stream: _Stream, lanes: NDArray[np.intp], words: NDArray[np.uint64]) -> None:
    place = stream.counts[lanes] * stream.words.shape[1] + lanes
    stream.words.reshape(-1)[place] = words & np.uint64(0xFFFFFFFF)
    stream.counts[lanes] += 1


def _lay_out(stream: _Stream, lanes: slice, times: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The words of neighbouring lanes of one segment, in the order in which they are taken, and each group's number.

    A lane begins with FIRST_WORDS, and takes another whenever it has used one. Those beyond its last are zeros,
    and left out at the end of a group.
    """
    counts, left = stream.counts[lanes], stream.left[:times, lanes]
    across = -(-len(counts) // GROUP)
    is_taken = np.zeros((FIRST_WORDS + times, across * GROUP), np.bool_)
    is_taken[:FIRST_WORDS, : len(counts)] = True
    is_taken[FIRST_WORDS:, : len(counts)] = np.diff(left, axis=0, prepend=counts[None].astype(np.int16)) < 0
    numbers = is_taken.cumsum(0, dtype=np.int16)
    group, time, within = np.nonzero(is_taken.reshape(-1, across, GROUP).transpose(1, 0, 2))
    lane = group * GROUP + within
    place = counts[lane] - numbers[time, lane]  # a word is read in the opposite order of its writing
    words = np.where(place >= 0, stream.words[:, lanes][np.maximum(place, 0), lane], np.uint32(0))
    start, real = np.searchsorted(group, np.arange(across)), np.flatnonzero(place >= 0)
    end = real[np.searchsorted(group[real], np.arange(across), "right") - 1] + 1
    return words[np.arange(len(group)) < end[group]], end - start
