"""Codes in lanes: entropy-coded in memory so that thousands of threads can decode them.

A file's streams are read from front to back. Here each column of a matrix, in segments of some hundred rows,
is a lane with a small stream of its own, coded by asymmetric numeral systems with 16-bit words. A thread per
lane decodes down its column, so that neighbouring threads write neighbouring codes, and a row's scale or
class is the same for all of them.

Neighbouring lanes are a group. The words of a group that all its lanes have are stored level by level, so that
the lanes read neighbouring words at about the same time; what a lane has beyond these is its tail, and the
tails follow, lane by lane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factorpack.runtime.lane_models import (
    PAIR_BITS,
    PAIR_TABLE_BITS,
    STATE_BITS,
    WORD_BITS,
    Codes,
    Models,
    escape,
    fit_models,
    fit_pairs,
)

GROUP = 128
"""Lanes of a group, except the last of a row of groups."""
LANE_BITS = {0: 3200, 1 << 20: 1600, 1 << 25: 3200}
"""By least number of codes: bits of a lane, about. Short lanes make many, to be decoded at a time; but each takes
24 bits more than its codes. Small matrices are decoded fast enough anyway, and large ones have enough lanes."""
LEAST_COLUMNS, LEAST_LANES = 64, 32
"""A narrower matrix, or a shorter one than a lane, is cut into other rows, of this many codes at least."""
LANE_BYTES = 3.2
"""What a lane takes beyond its codes, about."""
PAIR_MARGIN = 1.01
"""Pairs are decoded twice as fast, so they may take a little more."""
SHORT_TAIL, LONGEST_TAIL = 15, 4095
"""Words of a tail that a header can count, and that it can with another byte."""
TAIL_AT = STATE_BITS + WORD_BITS
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
    has_escapes: bool
    has_long_tails: bool
    is_pair: bool
    """Whether a symbol is two neighbouring codes of a row, so that a lane has two columns."""
    headers_at: int
    """Bytes before the lanes' headers, 32 bits each: the first state, and above it the words of the tail.
    Longer tails have a byte more per lane, after all headers: their words divided by 16."""
    groups_at: int
    """Bytes before three 32-bit integers per group: its first word, its levels, its steps without a tail."""
    table_at: int
    classes_at: int
    """Bytes before the classes of rows and columns, one byte each; with one model there are none."""

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


def pack_lanes(codes: Codes, columns: int, unit: int = 1, free: bool = True) -> tuple[Tensor, LaneLayout]:
    """Codes in memory order, at least one, in rows of `columns` -> bytes, and where everything is in them.

    Where the rows are `free`, they may be cut otherwise, to have lanes of some length. `unit` neighbouring
    codes are of different kinds, like the codes of a tile.
    """
    flat = codes.reshape(-1)
    wanted = LANE_BITS[max(size for size in LANE_BITS if size <= flat.size)] / max(_entropy(flat), 0.1)
    matrix = _in_rows(flat, columns)
    models, size = fit_models(matrix)
    if free and (columns < LEAST_COLUMNS or len(matrix) < wanted):
        narrow = -(-max(round(flat.size / wanted), min(flat.size, LEAST_LANES)) // unit) * unit
        narrow_matrix = _in_rows(flat, narrow)
        narrow_models, narrow_size = fit_models(narrow_matrix)
        if narrow_size + LANE_BYTES * narrow < size + LANE_BYTES * columns:
            columns, matrix, models, size = narrow, narrow_matrix, narrow_models, narrow_size
    symbols, words, is_pair = matrix, matrix, False
    if columns % 2 == 0 and matrix.dtype.itemsize == 1:
        pairs = _pairs(matrix)
        paired, paired_size = fit_pairs(pairs[1])
        if is_pair := paired_size <= PAIR_MARGIN * size:
            (words, symbols), models = pairs, paired
    segment = -(-len(matrix) // max(1, round(len(matrix) * (1 + is_pair) / wanted)))
    return _joined(flat.size, columns, segment, is_pair, models, *_encode(symbols, words, models, segment))


def _in_rows(codes: Codes, columns: int) -> Codes:
    """As a matrix, the last row padded with zeros."""
    rows = -(-codes.size // columns)
    if rows * columns == codes.size:
        return codes.reshape(rows, columns)
    return np.append(codes, np.zeros(rows * columns - codes.size, codes.dtype)).reshape(rows, columns)


def _entropy(codes: Codes) -> float:
    """Bits per code, with one model."""
    counts = np.bincount(codes.astype(np.int64) - int(codes.min()))
    share = counts[counts > 0] / codes.size
    return float(-(share * np.log2(share)).sum())


def _joined(
    count: int,
    columns: int,
    segment: int,
    is_pair: bool,
    models: Models,
    words: NDArray[np.uint16],
    headers: NDArray[np.uint32],
    longer: NDArray[np.uint8],
    groups: NDArray[np.int32],
) -> tuple[Tensor, LaneLayout]:
    """All arrays in one, each beginning at a multiple of 16 bytes."""
    sections = [words, np.concatenate([headers.view(np.uint8), longer]), groups, models.entries().reshape(-1)]
    if len(models.frequencies) > 1:
        sections.append(np.concatenate([models.rows, models.columns]))
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
        models.has_escapes,
        len(longer) > 0,
        is_pair,
        *starts[1:5],
    )
    return torch.from_numpy(packed), layout


def _pairs(codes: Codes) -> tuple[Codes, Codes]:
    """Neighbouring codes as the word of an escape, and as a symbol: the escape where it cannot hold them."""
    first, second = codes[:, ::2].astype(np.int16), codes[:, 1::2].astype(np.int16)
    half = 1 << PAIR_BITS - 1
    inside = (first > -half) & (first < half) & (second >= -half) & (second < half)
    symbols = np.where(inside, first << PAIR_BITS | second & (2 * half - 1), escape(PAIR_TABLE_BITS))
    return first << 8 | second & 0xFF, symbols.astype(np.int16)


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Words of some lanes in the order of writing, and their steps: (most words, lanes); and how many."""

    words: NDArray[np.uint16]
    steps: NDArray[np.uint16]
    counts: NDArray[np.int64]
    states: NDArray[np.int64]


def _encode(
    symbols: Codes, codes: Codes, models: Models, segment: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint32], NDArray[np.uint8], NDArray[np.int32]]:
    """Words, headers of all lanes, a byte more of their tails' lengths where one needs it, and groups."""
    rows, columns = codes.shape
    segments = -(-rows // segment)
    width = max(_LANES_AT_A_TIME // segments // GROUP, 1) * GROUP
    states, tails = np.empty((2, segments, columns), np.uint32)
    groups = np.empty((segments, -(-columns // GROUP), 3), np.int32)
    words: list[NDArray[np.uint16]] = []
    first, longest = 0, 0
    for left in range(0, columns, width):
        own = slice(left, left + width)
        part = replace(models, columns=models.columns[own])
        stream = _encode_lanes(symbols[:, own], codes[:, own], part, segment)
        each = min(width, columns - left)
        longest = longest or _longest_tail(stream.counts.reshape(segments, each))
        states[:, own] = stream.states.reshape(segments, each)
        for row, lane in product(range(segments), range(0, each, GROUP)):
            end = min(lane + GROUP, each)
            laid, tails[row, left + lane : left + end], *numbers = _lay_out(
                stream, slice(row * each + lane, row * each + end), longest
            )
            groups[row, (left + lane) // GROUP] = first, *numbers
            words.append(laid)
            first += len(laid)
    words.append(np.zeros(GROUP + 1, np.uint16))  # a lane loads one word ahead
    headers = (states | (tails & SHORT_TAIL) << TAIL_AT).reshape(-1)
    longer = (tails >> 4).astype(np.uint8).reshape(-1)
    return np.concatenate(words), headers, longer if longer.any() else longer[:0], groups.reshape(-1)


def _encode_lanes(symbols: Codes, codes: Codes, models: Models, segment: int) -> _Stream:
    """All lanes of some columns at the same time, from the last row to the first."""
    rows, columns = codes.shape
    segments, raw, bits = -(-rows // segment), models.raw_bits, models.table_bits
    frequency = models.frequencies.ravel()
    start = (np.cumsum(models.frequencies, 1) - models.frequencies).ravel()
    inverse = 1 / np.maximum(frequency, 1)
    limit = frequency << WORD_BITS + STATE_BITS - bits - raw
    joint, is_escape = models.joint(symbols)
    any_escape = is_escape.any(1)
    lanes = segments * columns
    most = segment * (bits + raw) // WORD_BITS + 2
    most += int(is_escape.sum(0).max()) if models.has_escapes else 0
    stream = _Stream(
        np.empty((most, lanes), np.uint16),
        np.empty((most, lanes), np.uint16),
        np.zeros(lanes, np.int64),
        np.full(lanes, 1 << STATE_BITS, np.int64),
    )
    for step in reversed(range(min(segment, rows))):
        own = joint[step::segment].reshape(-1)
        states = stream.states[: len(own)]
        if any_escape[step::segment].any():
            marked = np.flatnonzero(is_escape[step::segment])
            _write(stream, marked, codes[step::segment].reshape(-1)[marked].astype(np.int64), step)
        full = np.flatnonzero(states >= limit[own])
        _write(stream, full, states[full], step)
        states[full] >>= WORD_BITS
        each = frequency[own]
        quotient = ((states + 0.5) * inverse[own]).astype(np.int64)  # exact: states have 28 bits
        states += quotient * ((1 << bits) - each) + start[own]
        if raw:
            low = codes[step::segment].reshape(-1).astype(np.int64) & ((1 << raw) - 1)
            states[:] = states << raw | low
    return stream


def _write(stream: _Stream, lanes: NDArray[np.intp], words: NDArray[np.int64], step: int) -> None:
    place = stream.counts[lanes] * stream.words.shape[1] + lanes
    stream.words.reshape(-1)[place] = words & 0xFFFF
    stream.steps.reshape(-1)[place] = step
    stream.counts[lanes] += 1


def _longest_tail(counts: NDArray[np.int64]) -> int:
    """The words that a tail may have: another byte for each lane, or shorter lanes padded, what is less."""
    padding = 0
    for left in range(0, counts.shape[1], GROUP):
        own = counts[:, left : left + GROUP]
        padding += int(np.maximum(own.max(1, keepdims=True) - SHORT_TAIL - own, 0).sum())
    return SHORT_TAIL if WORD_BITS // 8 * padding <= counts.size else LONGEST_TAIL


def _lay_out(stream: _Stream, lanes: slice, longest: int) -> tuple[NDArray[np.uint16], NDArray[np.int64], int, int]:
    """A group's words in memory order, the lengths of its tails, its levels, and its steps without a tail.

    A word is read in the opposite order of its writing.
    """
    counts = stream.counts[lanes]
    most = int(counts.max())
    levels = max(int(counts.min()), most - longest)
    order = counts - 1 - np.arange(most)[:, None]  # (level, lane): when it was written
    exists = order >= 0
    written = np.take_along_axis(stream.words[:, lanes], np.maximum(order, 0), 0)
    written[~exists] = 0  # where even the levels are padded
    tail = written[levels:].T[exists[levels:].T]
    safe = 0
    if levels:
        last = order[levels - 1]
        steps = np.take_along_axis(stream.steps[:, lanes], np.maximum(last, 0)[None], 0)[0]
        safe = int(np.where(last >= 0, steps, 0xFFFF).min())
    return (
        np.concatenate([written[:levels].reshape(-1), tail]),
        np.maximum(counts - levels, 0),
        levels,
        safe,
    )
