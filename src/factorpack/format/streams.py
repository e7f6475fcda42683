"""A part <-> bytes: codes entropy coded or bit packed, floats coded or raw, whichever is smaller; the rest raw."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from factorpack.errors import FormatError
from factorpack.format import entropy, float_stream, trellis_stream
from factorpack.format.bitpack import bit_string_bytes, pack, unpack
from factorpack.format.chunks import FEWEST
from factorpack.format.encode_workers import EncodeCodes, encode_codes
from factorpack.format.symbols import Codes, Data
from factorpack.kinds import KINDS
from factorpack.kinds.base import PartSpec
from factorpack.quantize.mantissas import FLOAT_TYPES
from factorpack.quantize.uniform import code_range
from factorpack.record import Encoded

RAW, FLOATS, PACKED, ANS, TRELLIS = "raw", "floats", "packed", "ans", "trellis"
CODECS = (RAW, FLOATS, PACKED, ANS, TRELLIS)
_MOST_FLOATS = 1 << 20
"""Values of a part that is coded as floats: they are read at 10 to 20 ns each, and large ones are better read fast."""


def encode_part(
    part: Tensor, bits: int, split: int = 0, states: int = 0, encode: EncodeCodes = encode_codes
) -> tuple[str, bytes]:
    """The codec and the bytes of a part; `bits` is 0 for a part that is not codes.

    `split` and `states` come from `split_of` and `states_of`.
    """
    if not bits:
        return _encode_values(part, encode)
    codes = part.cpu().numpy()
    _check_range(codes, bits)
    if states:
        return TRELLIS, encode(codes, split, states)
    fixed_bytes = bit_string_bytes(codes.size, bits)
    if not _has_larger_table(codes, fixed_bytes):
        coded = encode(codes, split, states)
        if len(coded) < fixed_bytes:
            return ANS, coded
    low, _ = code_range(bits)
    return PACKED, pack((codes.astype(np.int32) - low).astype(np.uint16).ravel(), bits)


def _encode_values(part: Tensor, encode: EncodeCodes) -> tuple[str, bytes]:
    """Floats coded where that is shorter, anything else raw."""
    raw = raw_bytes(part)
    if part.dtype in FLOAT_TYPES and part.numel() <= _MOST_FLOATS and len(raw) > float_stream.LEAST_BYTES:
        coded = float_stream.encode(raw, FLOAT_TYPES[part.dtype], encode)
        if len(coded) < len(raw):
            return FLOATS, coded
    return RAW, raw


def _has_larger_table(codes: Codes, fixed_bytes: int) -> bool:
    """Whether entropy coding must be in vain: a table has a bit or more for each code from the lowest to the highest.

    Only chunks do without a table. Fifteen codes of 16 bits would take 40 ms to find that out.
    """
    if not 0 < codes.size < FEWEST:
        return False
    return int(codes.max()) - int(codes.min()) >= 8 * fixed_bytes


def estimated_part_bytes(part: Tensor, bits: int, split: int = 0, states: int = 0) -> int:
    """About the length of `encode_part`'s bytes, at a fraction of its cost; for planners. Floats count as raw."""
    if not bits:
        return part.numel() * part.dtype.itemsize
    if states:
        return trellis_stream.estimated_bytes(part.cpu().numpy(), states, split)
    fixed_bytes = bit_string_bytes(part.numel(), bits)
    return min(fixed_bytes, entropy.estimated_bytes(part.cpu().numpy(), split))


def split_of(encoded: Encoded, name: str) -> int:
    """How many output channels a part's columns divide into evenly, or 0."""
    return KINDS[encoded.kind].channel_split(encoded, name)


def states_of(encoded: Encoded, name: str) -> int:
    """States of the trellis that a part's codes are a path through, or 0."""
    return encoded.trellis if name == KINDS[encoded.kind].path_part else 0


def coded_bytes(encoded: Encoded) -> int:
    """About a weight's bytes in the file, without its row in the schema."""
    return sum(
        estimated_part_bytes(
            part, encoded.bits.get(name, 0), split_of(encoded, name), states_of(encoded, name)
        )
        for name, part in encoded.parts.items()
    )


def decode_part(codec: str, data: Data, spec: PartSpec, states: int = 0) -> Tensor:
    """The inverse of `encode_part`; the spec has been checked, the bytes may be anything."""
    if codec == RAW:
        return _from_raw(bytes(data), spec)
    if codec == FLOATS:
        values = float_stream.decode(bytes(data), math.prod(spec.shape), FLOAT_TYPES[spec.dtype])
        return torch.from_numpy(values.view(np.uint8)).view(spec.dtype).reshape(spec.shape)
    rows, columns = spec.shape
    if codec == PACKED:
        low, _ = code_range(spec.bits)
        wide = unpack(data, rows * columns, spec.bits).astype(np.int32) + low
        codes: Codes = wide.astype(np.int8 if spec.bits <= 8 else np.int16)
    elif codec == TRELLIS:
        codes = trellis_stream.decode(data, rows, columns, states)
        _check_range(codes, spec.bits)
    else:
        codes = entropy.decode(data, rows, columns)
        _check_range(codes, spec.bits)
    return torch.from_numpy(codes.reshape(rows, columns)).to(spec.dtype)


def _check_range(codes: Codes, bits: int) -> None:
    low, high = code_range(bits)
    if int(codes.min()) < low or int(codes.max()) > high:
        raise FormatError(f"codes {codes.min()} to {codes.max()} do not fit {bits} bits")


def raw_size(spec: PartSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def raw_bytes(values: Tensor) -> bytes:
    """Little-endian bytes, row by row."""
    plain = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous whatever its stride, but only stride 1 can be viewed as bytes.
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _from_raw(data: bytes, spec: PartSpec) -> Tensor:
    if len(data) != raw_size(spec):
        raise FormatError(f"{len(data)} bytes for values of shape {spec.shape} and type {spec.dtype}")
    if spec.dtype == torch.bool and data.strip(b"\0\1"):
        raise FormatError("a boolean is neither 0 nor 1")
    if not data:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(spec.dtype).reshape(spec.shape)
