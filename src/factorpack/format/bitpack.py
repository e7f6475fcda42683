"""Unsigned integers of any width from 1 to 16 bits, end to end in bytes, lowest bit first.

Eight values take as many bytes as one value has bits. So values and bytes are both viewed as rows of eight
values, and each place in a row is one shift for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError


def bit_string_bytes(count: int, width: int) -> int:
    """What `pack` makes of `count` values."""
    return (count * width + 7) // 8


def pack(values: NDArray[np.unsignedinteger], width: int) -> bytes:
    """Packs a flat array: value i takes bits i*width to (i+1)*width - 1 of the little-endian bit string."""
    rows = np.zeros((_rows(values.size), 8), np.uint16)
    rows.reshape(-1)[: values.size] = values
    packed = np.zeros((len(rows), width), np.uint8)
    for place, first, shift, dtype in _places(width):
        shifted = rows[:, place].astype(dtype) << shift
        for more in range(_touched(shift, width)):
            packed[:, first + more] |= (shifted >> (8 * more)).astype(np.uint8)
    return packed.reshape(-1)[: bit_string_bytes(values.size, width)].tobytes()


def unpack(data: bytes | memoryview, count: int, width: int) -> NDArray[np.uint16]:
    """The inverse of `pack`. The unused bits of the last byte must be zero."""
    if len(data) != bit_string_bytes(count, width):
        raise FormatError(f"{len(data)} bytes for {count} values of {width} bits")
    packed = np.zeros((_rows(count), width), np.uint8)
    packed.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.empty((len(packed), 8), np.uint16)
    for place, first, shift, dtype in _places(width):
        found = packed[:, first].astype(dtype)
        for more in range(1, _touched(shift, width)):
            found |= packed[:, first + more].astype(dtype) << (8 * more)
        rows[:, place] = (found >> shift) & ((1 << width) - 1)
    flat = rows.reshape(-1)
    if flat[count:].any():
        raise FormatError("bits are set after the last value")
    return flat[:count]


def _rows(count: int) -> int:
    return -(-count // 8)


def _places(width: int) -> Iterator[tuple[int, int, int, type[np.integer[Any]]]]:
    """Each place in a row: the byte and the bit where it begins, and a type for all bytes it touches."""
    for place in range(8):
        first, shift = divmod(place * width, 8)
        yield place, first, shift, np.uint16 if shift + width <= 16 else np.uint32


def _touched(shift: int, width: int) -> int:
    return bit_string_bytes(shift + width, 1)
