"""Unsigned integers of any width from 1 to 16 bits, end to end in bytes, lowest bit first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError


def packed_bytes(count: int, width: int) -> int:
    return (count * width + 7) // 8


def pack(values: NDArray[np.unsignedinteger], width: int) -> bytes:
    """Packs a flat array: value i takes bits i*width to (i+1)*width - 1 of the little-endian bit string."""
    wide = np.ascontiguousarray(values, dtype="<u2")
    bits = np.unpackbits(wide.view(np.uint8).reshape(-1, 2), axis=1, count=width, bitorder="little")
    return np.packbits(bits, bitorder="little").tobytes()


def unpack(data: bytes, count: int, width: int) -> NDArray[np.uint16]:
    """The inverse of `pack`. The unused bits of the last byte must be zero."""
    if len(data) != packed_bytes(count, width):
        raise FormatError(f"{len(data)} bytes for {count} values of {width} bits")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[count * width :].any():
        raise FormatError("bits are set after the last value")
    padded = np.zeros((count, 16), np.uint8)
    padded[:, :width] = bits[: count * width].reshape(count, width)
    return np.packbits(padded, axis=1, bitorder="little").view("<u2").reshape(count).astype(np.uint16)
