"""Floats <-> bytes, bit for bit: signs and exponents entropy coded, the mantissas' bits that are used packed.

Trained values of one tensor have few exponents, and rounded ones zeros at the end of every mantissa.
docs/format.md gives the layout.
"""

from __future__ import annotations

import struct

import numpy as np

from factorpack.errors import FormatError
from factorpack.format import entropy
from factorpack.format.bitpack import bit_string_bytes, pack, unpack
from factorpack.format.encode_workers import EncodeCodes
from factorpack.format.symbols import Codes
from factorpack.quantize.mantissas import Bits, FloatType, count_used_bits

_HEADER = struct.Struct("<BB")
LEAST_BYTES = 7
"""Of the shortest stream there is."""
_WIDEST = 16
"""Bits of a value in one bit string."""


def encode(raw: bytes, kind: FloatType, encode_codes: EncodeCodes) -> bytes:
    """The stream of at least one value, given as little-endian bytes."""
    values = np.frombuffer(raw, np.dtype(kind.held).newbyteorder("<")).astype(kind.held, copy=False)
    bits = count_used_bits(values, kind)
    exponents = (values >> kind.mantissa_bits & (1 << kind.exponent_bits) - 1).astype(np.int16)
    highest = int(exponents.max())
    below = highest - exponents
    is_negative = values >> kind.exponent_bits + kind.mantissa_bits != 0
    codes = np.where(is_negative, ~below, below).astype(np.int16)
    header = _HEADER.pack(bits, highest)
    return header + encode_codes(codes[None], 0, 0) + _pack_mantissas(values, bits, kind)


def decode(data: bytes, count: int, kind: FloatType) -> Bits:
    """The inverse of `encode`: each value's bits."""
    if len(data) < _HEADER.size:
        raise FormatError(f"a stream of floats of {len(data)} bytes has no header")
    bits, highest = _HEADER.unpack_from(data)
    if bits > kind.mantissa_bits or highest >= 1 << kind.exponent_bits:
        raise FormatError(
            f"floats of {bits} mantissa bits and exponents up to {highest}, allowed are "
            f"{kind.mantissa_bits} bits and exponents below {1 << kind.exponent_bits}"
        )
    end = len(data) - sum(bit_string_bytes(count, width) for width in _widths(bits))
    if end < _HEADER.size:
        raise FormatError(f"{len(data)} bytes for {count} floats of {bits} mantissa bits")
    codes = entropy.decode(data[_HEADER.size : end], 1, count)[0]
    values = _signs_and_exponents(codes, highest, kind)
    shift = kind.mantissa_bits - bits
    for width in _widths(bits):
        size = bit_string_bytes(count, width)
        values |= unpack(data[end : end + size], count, width).astype(kind.held) << shift
        end, shift = end + size, shift + width
    return values


def _signs_and_exponents(codes: Codes, highest: int, kind: FloatType) -> Bits:
    low, high = int(codes.min()), int(codes.max())
    if max(high, ~low) > highest:
        raise FormatError(f"codes {low} to {high} of exponents that are {highest} and lower")
    # The few codes there are, each as the bits it stands for.
    known = np.arange(low, high + 1)
    exponents = highest - np.where(known < 0, ~known, known)
    table = (known < 0) << kind.exponent_bits | exponents
    bits: Bits = (table << kind.mantissa_bits).astype(kind.held)
    return bits.take(codes.astype(np.intp) - low)


def _pack_mantissas(values: Bits, bits: int, kind: FloatType) -> bytes:
    """The lowest 16 of the bits that are used, of every value, then those above."""
    found, shift = b"", kind.mantissa_bits - bits
    for width in _widths(bits):
        found += pack((values >> shift & (1 << width) - 1).astype(np.uint16), width)
        shift += width
    return found


def _widths(bits: int) -> list[int]:
    """Bits of a value in each bit string."""
    return [min(_WIDEST, bits - start) for start in range(0, bits, _WIDEST)]
