"""Codes <-> symbols: codes in the order of their magnitude; and the two views of a matrix of codes."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Data = bytes | memoryview
"""A stream or a piece of one. Pieces of a memoryview are no copies."""
Codes = NDArray[np.signedinteger]
Symbols = NDArray[np.unsignedinteger]
SymbolType = type[np.uint8] | type[np.uint16]
_Kind = TypeVar("_Kind", bound=np.integer[Any])
_SLAB = 1 << 18
"""Symbols that become codes at a time, so that they stay in a core's cache."""


def to_symbols(codes: Codes) -> tuple[int, Codes, Symbols]:
    """The lowest code, the code of each symbol, and the codes as symbols."""
    low, high = int(codes.min()), int(codes.max())
    order = code_order(low, high - low + 1)
    held: NDArray[Any] = codes.astype(np.int8 if low >= -128 and high < 128 else np.int16, copy=False)
    unsigned = np.uint8 if held.itemsize == 1 else np.uint16
    # Unsigned arithmetic wraps around, and every result fits: both codes of a pair, then those of one sign.
    pairs = ((held << 1) ^ (held >> 8 * held.itemsize - 1)).view(unsigned)
    alone = np.abs(held).view(unsigned)
    alone += unsigned(min(-low, high) % (1 << 8 * held.itemsize))
    return low, order, np.minimum(pairs, alone, out=pairs).astype(symbol_type(len(order)), copy=False)


def code_order(low: int, size: int) -> Codes:
    """`size` codes from `low` on, sorted by magnitude, with the negative one of a pair first."""
    codes = np.arange(low, low + size)
    narrow = np.int8 if low >= -128 and low + size <= 128 else np.int16
    return codes[np.argsort(2 * np.abs(codes) + (codes > 0), kind="stable")].astype(narrow)


def codes_of(symbols: Symbols, order: Codes) -> Codes:
    """The code of every symbol, all of which have one; in place, and ten times as fast, from bytes to bytes.

    No step keeps the interpreter's lock, so that threads read several streams at a time.
    """
    low, high = int(order.min()), int(order.max())
    if symbols.dtype.itemsize > 1 or order.dtype.itemsize > 1 or low > 0 or high < 0:
        return order.take(symbols)
    paired, flat = min(-low, high), symbols.reshape(-1)
    for start in range(0, len(flat), _SLAB):
        own = flat[start : start + _SLAB]
        is_alone = own > 2 * paired
        alone = own - np.uint8(paired) if high > paired else np.uint8(paired) - own
        sign = np.negative(own & np.uint8(1))
        own >>= np.uint8(1)
        own ^= sign
        np.copyto(own, alone, where=is_alone)
    return symbols.view(np.int8)


def symbol_type(size: int) -> SymbolType:
    return np.uint8 if size <= 256 else np.uint16


def count_values(values: NDArray[np.integer], size: int) -> NDArray[np.int64]:
    """How often each of 0 to size - 1 occurs."""
    flat = values.reshape(-1)
    if flat.dtype != np.uint8 or flat.size < 1 << 16:
        return np.bincount(flat, minlength=size)
    # Twice as fast by pairs of bytes.
    pairs = np.bincount(flat[: flat.size // 2 * 2].view(np.uint16), minlength=1 << 16).reshape(256, 256)
    counts = pairs.sum(0) + pairs.sum(1)
    counts[flat[flat.size // 2 * 2 :]] += 1
    return np.asarray(counts[: max(size, int(counts.nonzero()[0][-1]) + 1)])


def to_view(matrix: NDArray[_Kind], split: int) -> NDArray[_Kind]:
    """(k, n) as (s, n/s * k): transposed, with each of s groups of columns in one row."""
    return matrix.T.reshape(split, -1) if split else matrix


def from_view(matrix: NDArray[_Kind], split: int, rows: int) -> NDArray[_Kind]:
    """The inverse of `to_view` for a matrix of `rows` rows, whose columns are then contiguous."""
    return matrix.reshape(-1, rows).T if split else matrix
