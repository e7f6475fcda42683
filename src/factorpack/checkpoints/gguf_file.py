"""Reads GGUF files from anyone, one tensor at a time: plain types as they are, quantized ones by the gguf package.

The header is walked here. The package's own reader makes an object of every element in every list of the
metadata, and believes their lengths.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from factorpack.checkpoints.entry import LARGEST_NUMEL, Entry, FileState, Note, read_into, reopened, state_of
from factorpack.errors import SourceError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PLAIN = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
"""ggml's numbers for types that hold values as they are."""
_STRING, _LIST = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number in the metadata, by its type."""
_UINT32 = 4
_ALIGNMENT = "general.alignment"
_LARGEST_ALIGNMENT = 1 << 20
_MOST_DIMENSIONS = 8
_MOST_TENSORS, _LONGEST_NAME, _SHORT = 1 << 16, 1 << 16, 1 << 12
_SLICE = 1 << 20
"""Elements that are dequantized at a time."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as the header describes it; `place` is relative to where the data begin."""

    shape: tuple[int, ...]
    kind: int
    place: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A type of blocks: so many elements in so many bytes."""

    number: int
    name: str
    elements: int
    bytes: int


class _Header:
    """Takes the fields of a header one after another, and never goes past the end of the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self.place = 0

    def take(self, form: str) -> int:
        (value,) = struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))
        number: int = value
        return number

    def bytes(self, count: int) -> bytes:
        self._check(count)
        self.place += count
        return self._file.read(count)

    def skip(self, count: int) -> None:
        if count <= _SHORT:  # what is read ahead stays
            self.bytes(count)
        else:
            self._check(count)
            self.place = self._file.seek(count, os.SEEK_CUR)

    def _check(self, count: int) -> None:
        if count > self._size - self.place:
            raise SourceError("ends inside its header: it is damaged")

    def text(self) -> str:
        length = self.take("Q")
        if length > _LONGEST_NAME:
            raise SourceError(f"has a name of {length} bytes, allowed are {_LONGEST_NAME}")
        return self.bytes(length).decode()

    def skip_value(self, kind: int) -> None:
        if kind in _SIZES:
            self.skip(_SIZES[kind])
        elif kind == _STRING:
            self.skip(self.take("Q"))
        elif kind == _LIST:
            inner, count = self.take("I"), self.take("Q")
            if inner in _SIZES:
                self.skip(_SIZES[inner] * count)
                return
            if inner != _STRING:
                raise SourceError(f"has a list of values of type {inner}, expected numbers or texts")
            for _ in range(count):  # each takes 8 bytes or more, so the file ends first
                self.skip(self.take("Q"))
        else:
            raise SourceError(f"has a value of the unknown type {kind}")


def read_gguf(path: Path) -> tuple[dict[str, Entry], tuple[Note, ...]]:
    """The tensors of a GGUF file, under its own names, and a line on those that are dequantized.

    Of a model in several files, `...-00001-of-00003.gguf`, all are read, whichever is named.
    """
    entries: dict[str, Entry] = {}
    quantized: Counter[str] = Counter()
    for part in _parts(path):
        for name, entry, kind in _read_part(part):
            if name in entries:
                raise SourceError(f"{part} has a tensor {name!r} that is there already: it is damaged")
            entries[name] = entry
            quantized.update([kind] if kind else [])
    if not quantized:
        return entries, ()
    kinds = ", ".join(f"{count} {kind}" for kind, count in quantized.most_common())
    text = f"{path.name}: {quantized.total()} of {len(entries)} tensors are quantized ({kinds}) and read as FP32 values"
    return entries, (Note(text, logging.WARNING),)


def _parts(path: Path) -> list[Path]:
    found = _PART.search(path.name)
    if found is None:
        return [path]
    stem, count = path.name[: found.start()], int(found[2])
    parts = []
    for number in range(1, count + 1):
        parts.append(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf"))
        if not parts[-1].is_file():
            raise SourceError(f"{path.name} is one of {count} files, and {parts[-1].name} is not beside it")
    return parts


def _read_part(path: Path) -> Iterator[tuple[str, Entry, str]]:
    """Every tensor, with the name of its type where it is quantized."""
    try:
        with path.open("rb") as file:
            state = state_of(file)
            begin, tensors = _read_header(_Header(file, state[2]))
        kinds = {each.kind: _quantized(each.kind) for each in tensors.values() if each.kind not in _PLAIN}
        _check_places(tensors, kinds, state[2] - begin)
    except (struct.error, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is not a whole GGUF file: {error}") from error
    except SourceError as error:
        error.args = (f"{path} {error}",)
        raise
    for name, stored in tensors.items():
        place, quantized = begin + stored.place, kinds.get(stored.kind)
        if quantized is None:
            load = partial(_read_plain, path, name, stored, place, state)
            yield name, Entry(stored.shape, _PLAIN[stored.kind], load), ""
        else:
            read = partial(_read_quantized, path, name, stored, quantized, place, state)
            yield name, Entry(stored.shape, torch.float32, read), quantized.name


def _read_header(header: _Header) -> tuple[int, dict[str, _Stored]]:
    """Where the data begin, and the tensors in them."""
    if header.bytes(4) != _MAGIC:
        raise SourceError("does not begin as a GGUF file does")
    version = header.take("I")
    if version not in _VERSIONS:
        big = " (a file for machines of the other byte order)" if not version & 0xFFFF else ""
        raise SourceError(f"is of GGUF version {version}{big}, known are 2 and 3")
    tensor_count, value_count = header.take("Q"), header.take("Q")
    if tensor_count > _MOST_TENSORS:
        raise SourceError(f"declares {tensor_count} tensors, allowed are {_MOST_TENSORS}")
    alignment = 32
    for _ in range(value_count):  # the file ends before a large number does
        key, kind = header.text(), header.take("I")
        if key == _ALIGNMENT and kind == _UINT32:
            alignment = header.take("I")
        else:
            header.skip_value(kind)
    if not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise SourceError(f"has its data at multiples of {alignment} bytes, expected a power of two")
    tensors: dict[str, _Stored] = {}
    for _ in range(tensor_count):
        name, stored = _read_tensor_info(header)
        if name in tensors:
            raise SourceError(f"has two tensors named {name!r}: it is damaged")
        tensors[name] = stored
    return header.place + -header.place % alignment, tensors


def _read_tensor_info(header: _Header) -> tuple[str, _Stored]:
    name, dimensions = header.text(), header.take("I")
    if dimensions > _MOST_DIMENSIONS:
        raise SourceError(f"has a tensor {name!r} of {dimensions} dimensions, allowed are {_MOST_DIMENSIONS}")
    shape = tuple(header.take("Q") for _ in range(dimensions))
    if math.prod(max(size, 1) for size in shape) > LARGEST_NUMEL:
        raise SourceError(f"has a tensor {name!r} of the shape {shape[::-1]}: it is damaged")
    return name, _Stored(shape[::-1], header.take("I"), header.take("Q"))


def _quantized(kind: int) -> _Quantized:
    """What the gguf package knows of a type; SourceError where it cannot read it."""
    gguf = _gguf()
    try:
        found = gguf.GGMLQuantizationType(kind)
        elements, size = gguf.GGML_QUANT_SIZES[found]
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), found)
    except (ValueError, KeyError) as error:
        raise SourceError(f"has tensors of the type {kind}, which the gguf package does not know") from error
    except NotImplementedError as error:
        raise SourceError(
            f"has tensors of the type {found.name}, which the gguf package does not read"
        ) from error
    return _Quantized(kind, found.name, elements, size)


def _gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise SourceError(
            "has quantized tensors, which are read by the gguf package: pip install 'factorpack[gguf]'"
        ) from error


def _check_places(tensors: dict[str, _Stored], kinds: dict[int, _Quantized], data_bytes: int) -> None:
    """Every tensor lies in the file, and none in another."""
    spans = []
    for name, each in tensors.items():
        kind = kinds.get(each.kind)
        if kind is None:
            size = each.numel * _PLAIN[each.kind].itemsize
        elif not each.shape or each.shape[-1] % kind.elements:
            raise SourceError(
                f"has a tensor {name!r} {each.shape} of {kind.name}, in blocks of {kind.elements}"
            )
        else:
            size = each.numel // kind.elements * kind.bytes
        spans.append((each.place, each.place + size, name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if end > start:
            raise SourceError(f"has the tensors {name!r} and {other!r} in the same place: it is damaged")
    if spans and max(end for _, end, _ in spans) > data_bytes:
        raise SourceError(f"ends inside its tensors, {data_bytes} bytes after they begin: it is damaged")


def _read_plain(path: Path, name: str, stored: _Stored, place: int, state: FileState) -> Tensor:
    values = torch.empty(stored.shape, dtype=_PLAIN[stored.kind])
    with reopened(path, name, state) as file:
        file.seek(place)
        read_into(file, values)
    return values


def _read_quantized(
    path: Path, name: str, stored: _Stored, kind: _Quantized, place: int, state: FileState
) -> Tensor:
    """Blocks are independent of each other: a slice of them at a time is dequantized."""
    gguf = _gguf()
    found = gguf.GGMLQuantizationType(kind.number)
    values = torch.empty(stored.numel)
    blocks = torch.empty(_SLICE // kind.elements * kind.bytes, dtype=torch.uint8)
    with reopened(path, name, state) as file, np.errstate(all="ignore"):
        file.seek(place)
        for start in range(0, len(values), _SLICE):
            out = values[start : start + _SLICE]
            part = blocks[: len(out) // kind.elements * kind.bytes]
            read_into(file, part)
            out.copy_(torch.from_numpy(gguf.quants.dequantize(part.numpy()[None], found)[0]))
    return values.reshape(stored.shape)
