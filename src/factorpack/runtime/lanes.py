"""Codes in lanes: entropy-coded in memory so that thousands of threads can decode them.

A file's streams are read from front to back. Here each column of a matrix, in segments of some hundred rows,
is a lane with a small stream of its own, coded by asymmetric numeral systems with 16-bit words. A thread per
lane decodes down its column, so that neighbouring threads write neighbouring codes, and a row's scale or
class is the same for all of them.

Neighbouring lanes are a group. The words of a group that all its lanes have are stored level by level, so that
the lanes read neighbouring words at about the same time; what a lane has beyond these is its tail, and the
tails follow, lane by lane. A group's patches are codes too rare for the tables: 32 bits for each, the row within
the segment (12), the column within the group (8) and the code (12).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factorpack.errors import WeightError
from factorpack.runtime.lane_models import (
    LIMIT,
    PAIR_BITS,
    STATE_BITS,
    WORD_BITS,
    Codes,
    Models,
    fit_models,
    fit_pairs,
)

GROUP = 128
"""Lanes of a group, except the last of a row of groups."""
LANE_BITS = {0: 3200, 1 << 22: 1600, 1 << 25: 3200}
"""By least number of codes: bits of a lane, about. Short lanes make many, to be decoded at a time; but each takes
24 bits more than its codes. Small matrices are decoded fast enough anyway, and large ones have enough lanes."""
LONGEST_SEGMENT = 4096
"""Rows of a lane that a patch can count."""
LEAST_COLUMNS, LEAST_LANES = 64, 32
"""A narrower matrix, or a shorter one than a lane, is cut into other rows, of this many codes at least."""
LANE_BYTES = 3.2
"""What a lane takes beyond its codes, about."""
PAIR_MARGIN = 1.01
"""Pairs are decoded twice as fast, so they may take a little more."""
TAILS = {0: 15, 4: 255, 8: 4095}
"""Words of a tail that a header can count, with as many bits more."""
TAIL_AT = STATE_BITS + WORD_BITS
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
    has_patches: bool
    tail_bits: int
    is_pair: bool
    """Whether a symbol is two neighbouring codes of a row, so that a lane has two columns."""
    is_indirect: bool
    """Whether every slot has the number of a symbol, in a byte, and the symbols' entries follow."""
    stride: int
    """Then: entries between those of one model and the next, 0 where symbols are numbered through."""
    headers_at: int
    """Bytes before the lanes' headers, 32 bits each: the first state, and above it the words of the tail.
    Longer tails have `tail_bits` more per lane, after all headers: their words divided by 16."""
    groups_at: int
    """Bytes before four 32-bit integers per group: its first word, its levels, its steps without a tail, and the
    number of patches before its own; and once more the last one, for all patches."""
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
    wanted = LANE_BITS[max(size for size in LANE_BITS if size <= flat.size)] / max(_entropy(flat), 0.1)
    matrix = _in_rows(flat, columns)
    models, size = fit_models(matrix)
    if free and (columns < LEAST_COLUMNS or len(matrix) < wanted):
        narrow = -(-max(round(flat.size / wanted), min(flat.size, LEAST_LANES)) // unit) * unit
        narrow_matrix = _in_rows(flat, narrow)
        narrow_models, narrow_size = fit_models(narrow_matrix)
        if narrow_size + LANE_BYTES * narrow < size + LANE_BYTES * columns:
            columns, matrix, models, size = narrow, narrow_matrix, narrow_models, narrow_size
    symbols: Codes = matrix >> models.raw_bits
    is_pair = False
    if columns % 2 == 0:
        pairs = _pairs(matrix)
        paired = fit_pairs(pairs, PAIR_MARGIN * size)
        if paired is not None:
            symbols, models, is_pair = pairs, paired, True
    segment = -(-len(matrix) // max(1, round(len(matrix) * (1 + is_pair) / wanted)))
    segment = min(segment, LONGEST_SEGMENT)
    encoded = _encode(symbols, matrix, models, segment, is_pair)
    return _joined(flat.size, columns, segment, is_pair, models, encoded)


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
    words: NDArray[np.uint16]
    headers: NDArray[np.uint32]
    tail_bits: int
    longer: NDArray[np.uint8]
    """As many bits more of each lane's tail length."""
    groups: NDArray[np.int32]
    patches: NDArray[np.int32]


def _joined(
    count: int, columns: int, segment: int, is_pair: bool, models: Models, encoded: _Encoded
) -> tuple[Tensor, LaneLayout]:
    """All arrays in one, each beginning at a multiple of 16 bytes."""
    nothing = np.empty(0, np.uint8)
    sections = [
        encoded.words,
        np.concatenate([encoded.headers.view(np.uint8), encoded.longer]),
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
        len(encoded.patches) > 0,
        encoded.tail_bits,
        is_pair,
        models.is_indirect,
        models.stride,
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
    """Words of some lanes in the order of writing, and their steps: (most words, lanes); and how many."""

    words: NDArray[np.uint16]
    steps: NDArray[np.uint16]
    counts: NDArray[np.int64]
    states: NDArray[np.int64]


def _encode(symbols: Codes, codes: Codes, models: Models, segment: int, is_pair: bool) -> _Encoded:
    """All lanes, some columns at a time."""
    rows, columns = symbols.shape
    segments, across = -(-rows // segment), -(-columns // GROUP)
    width = max(_LANES_AT_A_TIME // segments // GROUP, 1) * GROUP
    states, tails = np.empty((2, segments, columns), np.uint32)
    groups = np.empty((segments, across, 4), np.int32)
    words: list[NDArray[np.uint16]] = []
    is_rare = np.empty(symbols.shape, np.bool_)
    first, tail_bits = 0, -1
    for left in range(0, columns, width):
        own = slice(left, left + width)
        part = replace(models, columns=models.columns[own])
        joint, is_rare[:, own] = part.joint(symbols[:, own])
        raw = np.where(is_rare[:, own], 0, codes[:, own]) if models.raw_bits else None
        stream = _encode_lanes(joint, raw, part, segment)
        each = min(width, columns - left)
        if tail_bits < 0:
            tail_bits = _tail_bits(stream.counts.reshape(segments, each))
        states[:, own] = stream.states.reshape(segments, each)
        for row, lane in product(range(segments), range(0, each, GROUP)):
            end = min(lane + GROUP, each)
            laid, tails[row, left + lane : left + end], *numbers = _lay_out(
                stream, slice(row * each + lane, row * each + end), TAILS[tail_bits]
            )
            groups[row, (left + lane) // GROUP, :3] = first, *numbers
            words.append(laid)
            first += len(laid)
    words.append(np.zeros(GROUP + 1, np.uint16))  # a lane loads one word ahead
    patches, counts = _patches(codes, is_rare.repeat(2, 1) if is_pair else is_rare, segment, 1 + is_pair)
    groups[:, :, 3] = (np.cumsum(counts) - counts).reshape(segments, across)
    headers = (states | (tails & TAILS[0]) << TAIL_AT).reshape(-1)
    longer = (tails >> 4).astype(np.uint8).reshape(-1)
    end = np.array([0, 0, 0, len(patches)], np.int32)
    return _Encoded(
        np.concatenate(words),
        headers,
        tail_bits,
        {0: longer[:0], 4: _by_halves(longer), 8: longer}[tail_bits],
        np.append(groups.reshape(-1), end),
        patches,
    )


def _patches(
    codes: Codes, is_rare: NDArray[np.bool_], segment: int, each: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The patches of all groups, `each` columns per lane, and how many each group has."""
    row, column = np.nonzero(is_rare & (codes != 0))
    across = -(-codes.shape[1] // (each * GROUP))
    group = row // segment * across + column // (each * GROUP)
    order = np.argsort(group, kind="stable")
    code = codes[row, column].astype(np.int64) & 0xFFF
    patch = (row % segment << 20 | column % (each * GROUP) << 12 | code)[order]
    return patch.astype(np.uint32).view(np.int32), np.bincount(
        group, minlength=-(-len(codes) // segment) * across
    )


def _encode_lanes(joint: NDArray[np.int32], raw: Codes | None, models: Models, segment: int) -> _Stream:
    """All lanes of some columns at the same time, from the last row to the first."""
    rows, columns = joint.shape
    segments, raw_bits, bits = -(-rows // segment), models.raw_bits, models.table_bits
    frequency = models.frequencies.ravel()
    start = (np.cumsum(models.frequencies, 1) - models.frequencies).ravel()
    inverse = 1 / np.maximum(frequency, 1)
    limit = frequency << WORD_BITS + STATE_BITS - bits - raw_bits
    lanes, most = segments * columns, segment * (bits + raw_bits) // WORD_BITS + 2
    stream = _Stream(
        np.empty((most, lanes), np.uint16),
        np.empty((most, lanes), np.uint16),
        np.zeros(lanes, np.int64),
        np.full(lanes, 1 << STATE_BITS, np.int64),
    )
    for step in reversed(range(min(segment, rows))):
        own = joint[step::segment].reshape(-1)
        states = stream.states[: len(own)]
        full = np.flatnonzero(states >= limit.take(own))
        _write(stream, full, states[full], step)
        states[full] >>= WORD_BITS
        quotient = ((states + 0.5) * inverse.take(own)).astype(np.int64)  # exact: states have 28 bits
        states += quotient * ((1 << bits) - frequency).take(own) + start.take(own)
        if raw is not None:
            low = raw[step::segment].reshape(-1).astype(np.int64) & ((1 << raw_bits) - 1)
            states[:] = states << raw_bits | low
    return stream


def _write(stream: _Stream, lanes: NDArray[np.intp], words: NDArray[np.int64], step: int) -> None:
    place = stream.counts[lanes] * stream.words.shape[1] + lanes
    stream.words.reshape(-1)[place] = words & 0xFFFF
    stream.steps.reshape(-1)[place] = step
    stream.counts[lanes] += 1


def _tail_bits(counts: NDArray[np.int64]) -> int:
    """Bits more for each lane with which lanes take least: too short tails are padded to."""
    most = [counts[:, left : left + GROUP].max(1, keepdims=True) for left in range(0, counts.shape[1], GROUP)]
    missing = np.repeat(np.concatenate(most, 1), GROUP, 1)[:, : counts.shape[1]] - counts

    def taken(bits: int) -> int:
        return bits * counts.size + WORD_BITS * int(np.maximum(missing - TAILS[bits], 0).sum())

    return min(TAILS, key=taken)


def _lay_out(
    stream: _Stream, lanes: slice, longest: int
) -> tuple[NDArray[np.uint16], NDArray[np.int64], int, int]:
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
    tail = written[levels:].T[np.asarray(exists[levels:]).T]
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
