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


def periodic_taps(states: int) -> tuple[int, list[int]]:
    """The same sum with a single quantizer in it, a period above: the period, and how far above the parities lie.

    A quantizer is h1 / h0 times the parities, as polynomials of bits, and h0 divides 1 + D^period.

    >>> periodic_taps(8)
    (7, [2, 3, 4, 6])
    """
    h0, h1 = MEMORY[states]
    period = next(n for n in range(1, states) if _divided(1 | 1 << n, h0)[1] == 0)
    quotient, _ = _divided(1 | 1 << period, h0)
    product = 0
    for place in range(quotient.bit_length()):
        product ^= (h1 << place) * (quotient >> place & 1)
    return period, [back for back in range(product.bit_length()) if product >> back & 1]


def _divided(polynomial: int, by: int) -> tuple[int, int]:
    """Quotient and remainder of polynomials of bits."""
    quotient = 0
    while (places := polynomial.bit_length() - by.bit_length()) >= 0:
        quotient |= 1 << places
        polynomial ^= by << places
    return quotient, polynomial


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


def quantizers_of(parities: NDArray[np.uint8], states: int, segment: int) -> NDArray[np.uint8]:
    """The quantizers of paths down all columns, (rows, columns), from the parities of all their indices."""
    rows, columns = parities.shape
    period, backs = periodic_taps(states)
    height = -(-segment // period) * period
    padded = np.zeros((-(-rows // segment), height, columns), np.uint8)
    for top in range(0, rows, segment):
        own = parities[top : top + segment]
        for back in backs:
            padded[top // segment, back : len(own)] ^= own[: max(len(own) - back, 0)]
    runs = padded.reshape(-1, height // period, period, columns)
    np.bitwise_xor.accumulate(runs, axis=1, out=runs)
    return padded[:, :segment].reshape(-1, columns)[:rows]


def indices_of(levels: Integers, states: int, segment: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """The index and quantizer of every level of (rows, columns); raises FormatError if they are not a path."""
    sizes = np.abs(levels.astype(np.int32))
    quantizer = quantizers_of((sizes + 1 >> 1 & 1).astype(np.uint8), states, segment)
    quantizer[:, quiet_columns(levels)] = 0
    if ((sizes & 1 != quantizer) & (sizes != 0)).any():
        raise FormatError(f"the codes are not a path through a trellis of {states} states")
    return (sizes + 1 >> 1) * np.sign(levels).astype(np.int32), quantizer


def levels_of(indices: Integers, quantizer: Integers) -> NDArray[np.signedinteger]:
    """The inverse of `indices_of`, once the quantizers are known; twice as wide as the indices."""
    wide = indices.astype(np.int16 if indices.itemsize == 1 else np.int32)
    return np.asarray(2 * wide - quantizer.astype(wide.dtype) * np.sign(wide))


def walk(indices: Integers, states: int, segment: int) -> NDArray[np.signedinteger]:
    """The levels of indices, (rows, columns), that are all known: no column is quiet."""
    return levels_of(indices, quantizers_of((indices & 1).astype(np.uint8), states, segment))
