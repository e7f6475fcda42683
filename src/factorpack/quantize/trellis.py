"""Dependent quantization: two quantizers, and a state machine that selects one for each element.

Q0 has the even multiples of a step, Q1 the odd ones and zero: index k of quantizer q is the level
2k - q sign(k). The parity of an index drives the machine, so a reader knows the quantizer of every element,
and a path through the states has levels as dense as the step at the cost of codes half as dense. Paths
run down the columns of a matrix, in segments of rows that all start in state 0; a quiet column, which is
nearly all zeros, gains nothing and uses Q0 throughout.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError

MEMORY = {4: (0o5, 0o2), 8: (0o13, 0o4)}
"""Parity checks h0 and h1 of Ungerboeck's amplitude codes, by number of states."""
LONGEST = 128
"""Maximum rows per segment: longer ones gain little, and a reader takes one step per row."""
SHORTEST = 16
"""Minimum rows for a path: with fewer there are too few choices to gain anything."""

Integers = NDArray[np.integer[Any]]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """Each state's quantizer, (S + 1,), and the state after each parity, (S + 1, 2); the last one is absorbing."""

    quantizer: NDArray[np.uint8]
    after: NDArray[np.uint8]

    @property
    def states(self) -> int:
        """Number of states of a path, without the absorbing one of quiet columns."""
        return len(self.quantizer) - 1

    def start(self, quiet: Flags, segments: int) -> NDArray[np.uint8]:
        """The initial states of all segments: (segments, columns)."""
        return np.tile(np.where(quiet, np.uint8(self.states), np.uint8(0)), (segments, 1))


@cache
def machine(states: int) -> Machine:
    """The observer form of a systematic encoder, whose first register selects the quantizer."""
    memory = states.bit_length() - 1
    h0, h1 = MEMORY[states]
    after = np.full((states + 1, 2), states, np.uint8)
    for state, parity in product(range(states), (0, 1)):
        registers = [state >> memory - 1 - place & 1 for place in range(memory)] + [0]
        moved = [
            registers[place] ^ (h0 >> place & registers[0]) ^ (h1 >> place & parity)
            for place in range(1, memory + 1)
        ]
        after[state, parity] = int("".join(map(str, moved)), 2)
    quantizer = (np.arange(states + 1) >> memory - 1 & 1).astype(np.uint8)
    return Machine(quantizer, after)


def segment_rows(rows: int) -> int:
    """Rows per segment, for segments as equal as possible and no longer than LONGEST.

    >>> segment_rows(300), segment_rows(64)
    (100, 64)
    """
    return -(-rows // -(-rows // LONGEST))


def quiet_columns(levels: Integers) -> Flags:
    """Columns without an odd level, which need no path."""
    return np.asarray(~(levels & 1).any(0))


def taps(states: int) -> tuple[list[int], list[int]]:
    """How many rows above lie the quantizers, and the parities, whose sum modulo 2 is a row's quantizer.

    The machine is linear: its registers are sums of earlier first registers, the quantizers, and parities.

    >>> taps(8)
    ([1, 3], [2])
    """
    backs = range(1, states.bit_length())
    h0, h1 = ([back for back in backs if check >> back & 1] for check in MEMORY[states])
    return h0, h1


class Quantizers:
    """The quantizers of all paths, row by row of their segments, from the parities of the rows above."""

    def __init__(self, states: int, quiet: Flags) -> None:
        self._taps = [(back - 1, which) for which, rows in enumerate(taps(states)) for back in rows]
        self._loud = (~quiet).view(np.uint8)
        self._last: deque[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = deque(maxlen=3)

    def next(self, segments: int) -> NDArray[np.uint8]:
        """Of the next row of each segment: (segments, columns). The last segment may end before the others."""
        found = np.zeros((segments, len(self._loud)), np.uint8)
        for place, which in self._taps:
            if place < len(self._last):
                found ^= self._last[place][which][:segments]
        found &= self._loud
        self._last.appendleft((found, found))
        return found

    def follow(self, indices: Integers) -> None:
        """What that row's indices are."""
        quantizer, _ = self._last[0]
        self._last[0] = quantizer, (indices & 1).astype(np.uint8)


def indices_of(levels: Integers, states: int, segment: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """The index and quantizer of every level of (rows, columns); raises FormatError if they are not a path.

    Rows r, r + segment, ... hold row r of all segments, which are processed together.
    """
    quantizers = Quantizers(states, quiet_columns(levels))
    indices, quantizer = np.empty(levels.shape, np.int32), np.empty(levels.shape, np.uint8)
    for row in range(min(segment, len(levels))):
        level = levels[row::segment].astype(np.int32)
        quantizer[row::segment] = q = quantizers.next(len(level))
        if ((level & 1 != q) & (level != 0)).any():
            raise FormatError(f"the codes are not a path through a trellis of {states} states")
        indices[row::segment] = index = (level + q * np.sign(level)) >> 1
        quantizers.follow(index)
    return indices, quantizer


def levels_of(indices: Integers, quantizer: Integers) -> NDArray[np.signedinteger]:
    """The inverse of `indices_of`, once the quantizers are known; twice as wide as the indices."""
    wide = indices.astype(np.int16 if indices.itemsize == 1 else np.int32)
    return np.asarray(2 * wide - quantizer.astype(wide.dtype) * np.sign(wide))


def walk(indices: Integers, states: int, segment: int) -> NDArray[np.signedinteger]:
    """The levels of indices, (rows, columns), that are all known: no column is quiet."""
    quantizers = Quantizers(states, np.zeros(indices.shape[1], np.bool_))
    wide = np.int16 if indices.itemsize == 1 else np.int32
    levels: NDArray[np.signedinteger] = np.empty(indices.shape, wide)
    for row in range(min(segment, len(indices))):
        own = indices[row::segment]
        levels[row::segment] = levels_of(own, quantizers.next(len(own)))
        quantizers.follow(own)
    return levels
