"""The header of an entropy-coded stream <-> bytes: what a reader knows before the tables."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from factorpack.errors import FormatError
from factorpack.format.chunks import LENGTH
from factorpack.format.classes import MAX_CLASSES
from factorpack.format.frequency_tables import MAX_TOTAL_BITS, MIN_TOTAL_BITS
from factorpack.format.symbols import Data

_NARROW, _WIDE, _SPLIT = struct.Struct("<BbBBB"), struct.Struct("<BhHBB"), struct.Struct("<I")
_WIDE_FLAG, _SPLIT_FLAG, _CHUNKED_FLAG, _TOTAL_MASK = 32, 64, 128, 31


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the tables."""

    total_bits: int
    low: int
    symbols: int
    row_classes: int
    column_classes: int
    split: int
    chunks: tuple[tuple[int, int], ...] = ()
    """The models whose codes are in chunks, ascending, and the length of each chunk."""


def write_header(header: Header, models_per_class: int = 1) -> bytes:
    is_wide = header.low < -128 or header.low + header.symbols > 128
    flags = header.total_bits | (_WIDE_FLAG if is_wide else 0) | (_SPLIT_FLAG if header.split else 0)
    flags |= _CHUNKED_FLAG if header.chunks else 0
    fields = (header.low, header.symbols - 1, header.row_classes - 1, header.column_classes - 1)
    data = (_WIDE if is_wide else _NARROW).pack(flags, *fields)
    if header.split:
        data += _SPLIT.pack(header.split)
    if header.chunks:
        named = sum(1 << model for model, _ in header.chunks)
        data += named.to_bytes(8 * models_per_class, "little")
        data += b"".join(LENGTH.pack(length) for _, length in header.chunks)
    return data


def read_header(data: Data, models_per_class: int = 1) -> tuple[Header, int]:
    """The header and its length."""
    flags = data[0] if data else 0
    layout = _WIDE if flags & _WIDE_FLAG else _NARROW
    length = layout.size + (_SPLIT.size if flags & _SPLIT_FLAG else 0)
    if len(data) < length:
        raise FormatError(f"an entropy-coded stream of {len(data)} bytes has no header")
    _, low, symbols, row_classes, column_classes = layout.unpack_from(data)
    split = _SPLIT.unpack_from(data, layout.size)[0] if flags & _SPLIT_FLAG else 0
    total_bits = flags & _TOTAL_MASK
    if not MIN_TOTAL_BITS <= total_bits <= MAX_TOTAL_BITS or (flags & _SPLIT_FLAG and not split):
        raise FormatError(
            f"an entropy coder's flags are {flags}, with a total of 2^{total_bits} and a split of {split}"
        )
    if (
        low + symbols > (32767 if flags & _WIDE_FLAG else 127)
        or max(row_classes, column_classes) >= MAX_CLASSES
    ):
        raise FormatError(
            f"{row_classes + 1} and {column_classes + 1} classes for codes {low} to {low + symbols}"
        )
    chunked: tuple[tuple[int, int], ...] = ()
    if flags & _CHUNKED_FLAG:
        chunked, taken = _read_chunk_lengths(
            data[length:], row_classes + column_classes + 1, models_per_class
        )
        length += taken
    return Header(total_bits, low, symbols + 1, row_classes + 1, column_classes + 1, split, chunked), length


def _read_chunk_lengths(
    data: Data, classes: int, models_per_class: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Which models' codes are in chunks and how long each is; and the bytes this took."""
    models, start = classes * models_per_class, 8 * models_per_class
    if len(data) < start:
        raise FormatError("an entropy-coded stream ends before its chunks are named")
    named = int.from_bytes(data[:start], "little")
    if not 0 < named < 1 << models:
        raise FormatError(f"chunks of the models {named:b}, in binary, where there are {models}")
    found = [model for model in range(models) if named >> model & 1]
    end = start + LENGTH.size * len(found)
    if len(data) < end:
        raise FormatError("an entropy-coded stream ends before its chunks' lengths")
    lengths = [length for (length,) in LENGTH.iter_unpack(data[start:end])]
    return tuple(zip(found, lengths, strict=True)), end
