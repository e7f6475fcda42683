"""Lanes of a matrix: the reference in numpy, which encodes all of them side by side.

A lane is encoded from its last row to the first, and from its last bit. lanes.py says how the words of a group are laid
out, lane_models.py how a symbol is coded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factorpack.runtime.lane_models import Codes, Models, pairs_of

GROUP = 32
"""Lanes of a group, except the last of a row of groups: the threads of a warp."""
FIRST_WORDS = 3
"""Words that a lane has ahead, so that it need not wait for memory."""
MOST_STEPS = 4
_LANES_AT_A_TIME = 1 << 14
"""Lanes that are encoded at a time, so that their states stay in a core's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedLanes:
    """The arrays of all groups, on the device of the codes: see LaneLayout."""

    words: Tensor
    """int32"""
    states: Tensor
    """int16"""
    groups: Tensor
    """int32"""
    patches: Tensor
    """int32"""


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


def encode_reference(matrix: Tensor, models: Models, segment: int) -> EncodedLanes:
    """All lanes of a matrix of codes, some columns at a time, in numpy."""
    codes: Codes = matrix.numpy()
    symbols = pairs_of(matrix).numpy() if models.is_pair else codes >> models.raw_bits
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
    joined = np.concatenate([*chain.from_iterable(words)]).view(np.int32)
    return EncodedLanes(*map(torch.from_numpy, (joined, states.reshape(-1).view(np.int16), groups, patches)))


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


def symbol_steps(models: Models) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For every symbol of every model, what a step of the encoder adds: to the state, and to its place among slots.

    As FSE does: (state + first) >> 16 bits are written, after which the state has the symbol's range.
    """
    frequency, bits = models.frequencies.ravel().astype(np.int32), models.table_bits
    most = bits - np.floor(np.log2(np.maximum(frequency - 1, 1))).astype(np.int32)
    most[frequency == 1] = bits
    first = np.cumsum(frequency) - frequency
    return (most << 16) - (frequency << most), (first - frequency).astype(np.int32)


def _encode_lanes(joint: NDArray[np.int32], raw: Codes | None, models: Models, segment: int) -> _Stream:
    """All lanes of some columns at the same time, from the last row to the first, and from their last bit."""
    rows, columns = joint.shape
    segments, raw_bits, bits = -(-rows // segment), models.raw_bits, models.table_bits
    slots, (shifts, base) = models.slots(), symbol_steps(models)
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
