"""Frequency tables of the entropy coder: counts -> integer frequencies -> bits, and back.

Every table sums to a power of two. Its first frequency is what the others leave. The others, up to the last
that is not zero, are stored as bit lengths and mantissas, so that a rare symbol takes a bit or two.
"""

from __future__ import annotations

from collections.abc import Sequence

import constriction
import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError
from factorpack.format.bitpack import bit_string_bytes, pack, unpack
from factorpack.format.symbols import Data

MIN_TOTAL_BITS, MAX_TOTAL_BITS = 8, 16
"""The frequencies of a table sum to 2^t, with t between these."""
_MODEL_BITS = 24
_SLAB = 1 << 18
"""Frequencies that are read at a time: sixty tables of sixty thousand would take much memory."""

Counts = NDArray[np.signedinteger]
Bits = NDArray[np.integer]


def normalized(counts: Counts, total_bits: int) -> Counts:
    """Rows of counts, (g, m), scaled to sum to 2^total_bits, with at least one for each symbol that occurs."""
    total = 1 << total_bits
    occurs = counts > 0
    free = total - occurs.sum(1, keepdims=True)
    if (free < 0).any():
        raise FormatError(f"{total - int(free.min())} symbols do not fit a table of {total}")
    frequencies = np.where(occurs, 1 + counts * free // np.maximum(counts.sum(1, keepdims=True), 1), 0)
    # The remainder of rounding goes to the most frequent symbol, where it costs least.
    rows = np.arange(len(counts))
    frequencies[rows, counts.argmax(1)] += total - frequencies.sum(1)
    return frequencies


def message_bits(counts: Counts, frequencies: Counts, total_bits: int) -> NDArray[np.float64]:
    """Bits that symbols which occur `counts` times, (g, m), take in a message with each of the tables: (g,).

    constriction's range of symbol i of s begins at F_i (2^24 - s) / 2^t, rounded down, plus i.
    """
    begin = np.zeros((len(counts), counts.shape[1] + 1), np.int64)
    np.cumsum(frequencies, 1, out=begin[:, 1:])
    begin *= (1 << _MODEL_BITS) - used(frequencies)[:, None]
    shares = np.diff(begin >> total_bits, axis=1) + 1
    return np.asarray((counts * (_MODEL_BITS - np.log2(shares))).sum(1))


def model(frequencies: Counts) -> object:
    """constriction's model for one table, (s,) with s > 1.

    Every F_i (2^24 - s) / 2^t has at most 24 bits above and t below the point, so all of it is exact
    in float64 and the model is the same on every machine.
    """
    return constriction.stream.model.Categorical(frequencies.astype(np.float64), perfect=False)


def used(frequencies: Counts) -> Counts:
    """Symbols of each table, (g, m), up to the last with a frequency: (g,), at least 1."""
    size = frequencies.shape[1]
    return np.asarray(size - (frequencies[:, ::-1] > 0).argmax(1))


def table_bits(frequencies: Counts, total_bits: int) -> Counts:
    """Bits that each table of (g, m) takes in `write_tables`, without its size: (g,)."""
    stored = _stored(frequencies)
    lengths = _lengths(frequencies[:, 1:])
    each = _steps(lengths, total_bits) + 1 + np.maximum(lengths - 1, 0)
    return np.asarray((each * stored).sum(1))


def size_bits(symbols: int) -> int:
    """Width of the size of a table of at most this many symbols."""
    return (symbols - 1).bit_length()


def write_tables(classes: Sequence[Counts], models: Counts, total_bits: int) -> bytes:
    """Sizes of the models, (g, m); then changes of bit length in unary, then mantissas, of all tables."""
    written = [*classes, models]
    width = size_bits(models.shape[1])
    sizes = pack((used(models) - 1).astype(np.uint16), width) if width else b""
    lengths = np.concatenate([_lengths(each[:, 1:])[_stored(each)] for each in written])
    steps = np.concatenate([_steps(_lengths(each[:, 1:]), total_bits)[_stored(each)] for each in written])
    values = np.concatenate([each[:, 1:][_stored(each)] for each in written])
    ends, widths = np.cumsum(steps + 1), np.maximum(lengths - 1, 0)
    begin = int(ends[-1]) if len(ends) else 0
    bits = np.zeros(begin + int(widths.sum()), np.uint8)
    bits[ends - 1] = 1
    places = begin + np.cumsum(widths) - widths
    for bit in range(total_bits):
        has = widths > bit
        bits[places[has] + bit] = values[has] >> bit & 1
    return sizes + np.packbits(bits, bitorder="little").tobytes()


def read_tables(
    data: Data, classes: Sequence[int], models: int, symbols: int, total_bits: int
) -> tuple[list[Counts], int]:
    """Tables of known sizes and `models` more, and the bytes they took; the data is untrusted and may go on."""
    width = size_bits(symbols)
    start = bit_string_bytes(models, width)
    if len(data) < start:
        raise FormatError(f"{len(data)} bytes cannot hold the sizes of {models} tables")
    sizes = [*classes, *(unpack(data[:start], models, width).tolist() if width else [0] * models)]
    sizes[len(classes) :] = [size + 1 for size in sizes[len(classes) :]]
    if max(sizes[len(classes) :]) > symbols:
        raise FormatError(f"a table of {max(sizes[len(classes) :])} symbols, the alphabet has {symbols}")
    values, taken = _read_values(data[start:], np.array(sizes) - 1, total_bits)
    return _add_first(values, sizes, total_bits), start + taken


def _read_values(data: Data, stored: Counts, total_bits: int) -> tuple[Counts, int]:
    """All stored frequencies, `stored` of each table, and the bytes they took."""
    count = int(stored.sum())
    if 8 * len(data) < count:
        raise FormatError(f"{len(data)} bytes cannot hold {count} frequencies")
    # No frequency takes more than a change of length from 0 to t + 1, or back, and a mantissa.
    longest = bit_string_bytes(count, 3 * total_bits + 4)
    bits = np.unpackbits(np.frombuffer(data[:longest], np.uint8), bitorder="little")
    ends = np.flatnonzero(bits)[:count].astype(np.int32)
    if len(ends) < count:
        raise FormatError("the tables of an entropy coder are cut short")
    begin = int(ends[-1]) + 1 if count else 0
    # A step beyond 64 leaves the range of lengths, however far.
    steps = np.minimum(np.diff(ends, prepend=np.int32(-1)) - 1, 127).astype(np.int8)
    del ends
    values, end = _mantissas(bits, begin, _lengths_of(steps, stored, total_bits))
    taken = bit_string_bytes(end, 1)
    if bits[end : 8 * taken].any():
        raise FormatError("bits are set after the last frequency")
    return values, taken


def _lengths_of(steps: Bits, stored: Counts, total_bits: int) -> Bits:
    """The inverse of `_steps`, for tables one after the other."""
    drops = np.where(steps % 2, (steps >> 1) + 1, -(steps >> 1)).astype(np.int8)
    fallen = np.concatenate([[0], np.cumsum(drops, dtype=np.int32)], dtype=np.int32)
    before = np.repeat(fallen[np.cumsum(stored) - stored], stored)  # the sum at the end of the last table
    before -= fallen[1:]
    lengths = before + (total_bits - 2)
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > total_bits + 1):
        found = f"{lengths.min()} to {lengths.max()}"
        raise FormatError(f"a frequency of {found} bits, allowed are 0 to {total_bits + 1}")
    return lengths.astype(np.int8)


def _mantissas(bits: Bits, begin: int, lengths: Bits) -> tuple[Counts, int]:
    """Frequencies of known bit lengths, whose lower bits start at `begin`, and where these end."""
    widths = np.maximum(lengths - 1, 0)
    end = begin + int(widths.sum())
    if end > len(bits):
        raise FormatError("the tables of an entropy coder are cut short")
    values = np.empty(len(lengths), np.int32)
    for start in range(0, len(values), _SLAB):
        own = slice(start, start + _SLAB)
        width, value = widths[own], np.where(lengths[own] > 0, 1 << widths[own].astype(np.int32), 0)
        places = begin + np.cumsum(width, dtype=np.int64) - width
        for bit in range(int(width.max(initial=0))):
            has = width > bit
            value[has] |= bits[places[has] + bit].astype(np.int32) << bit
        values[own] = value
        begin += int(width.sum())
    return values, end


def _add_first(values: Counts, sizes: Sequence[int], total_bits: int) -> list[Counts]:
    """Adds the first frequency of each table, which is implied by the others."""
    found, at = [], 0
    for size in sizes:
        rest = values[at : at + size - 1]
        first = (1 << total_bits) - int(rest.sum())
        if first < 0:
            raise FormatError(f"the frequencies of an entropy model exceed {1 << total_bits}")
        found.append(np.concatenate([[first], rest], dtype=np.int32))
        at += size - 1
    return found


def _stored(frequencies: Counts) -> NDArray[np.bool_]:
    """Which of the frequencies after the first, (g, m - 1), are stored."""
    return np.asarray(np.arange(1, frequencies.shape[1]) < used(frequencies)[:, None])


def _lengths(values: Counts) -> Counts:
    """Bit lengths, 0 for 0."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def _steps(lengths: Counts, total_bits: int) -> Counts:
    """How much shorter each length of (g, m - 1) is than the one before: 0, 1 down, 1 up, 2 down, ...

    Symbols are sorted by the magnitude of their codes, so lengths mostly fall, and fall slowly.
    """
    start = np.full((len(lengths), 1), total_bits - 2)
    drops = np.concatenate([start, lengths], 1)[:, :-1] - lengths
    return np.where(drops > 0, 2 * drops - 1, -2 * drops)
