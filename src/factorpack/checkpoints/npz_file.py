"""Reads NumPy archives from anyone, one array at a time. Pickled objects in them are never opened."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from factorpack.checkpoints.entry import LARGEST_NUMEL, Entry, FileState, Note, list_names, reopened, state_of
from factorpack.errors import SourceError

LARGEST_EXPANSION = 64
"""How many times the bytes of an archive its arrays may have: zeros compress a thousandfold."""
SPARE_BYTES = 1 << 20
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_LONGEST_HEADER = 10_000
_PIECE = 1 << 24
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_NUMBERS = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "c8", "c16"}
_FAILURES = (zipfile.BadZipFile, zlib.error, ValueError, LookupError, RuntimeError, EOFError)
"""What zipfile raises on damaged archives."""


@dataclass(frozen=True, slots=True)
class _Array:
    """An array in an archive, as its header describes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_transposed: bool
    """Whether its first index changes fastest."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npz(path: Path) -> tuple[dict[str, Entry], tuple[Note, ...]]:
    """The arrays of numbers in an .npz file, and a line on those of anything else."""
    with path.open("rb") as file:
        state = state_of(file)
        try:
            with zipfile.ZipFile(file) as archive:
                found = dict(_arrays(archive))
        except (*_FAILURES, OSError) as error:  # a place before the beginning of a file is an OSError
            raise SourceError(f"{path} is not a whole .npz file: {error or type(error).__name__}") from error
        except SourceError as error:
            error.args = (f"{path} {error}",)
            raise
    declared, size = sum(each.bytes for each in found.values()), path.stat().st_size
    if declared > LARGEST_EXPANSION * size + SPARE_BYTES:
        raise SourceError(
            f"{path} has {size} bytes and arrays of {declared}, allowed are {LARGEST_EXPANSION} times as many: "
            "save them uncompressed, with numpy.savez"
        )
    numbers = {name: each for name, each in found.items() if each.dtype.str[1:] in _NUMBERS}
    if not numbers:
        raise SourceError(f"{path} holds no arrays of numbers, expected the weights of a model")
    left = [name for name in found if name not in numbers]
    text = f"{path.name}: left out, because they are no numbers: {list_names(left)}"
    entries = {name: _entry(path, name, each, state) for name, each in numbers.items()}
    return entries, (Note(text),) if left else ()


def _arrays(archive: zipfile.ZipFile) -> Iterator[tuple[str, _Array]]:
    names: set[str] = set()
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if info.compress_type not in _PACKED or info.flag_bits & 1:
            raise SourceError(f"has {name!r} compressed or encrypted in another way than numpy does")
        if name in names:
            raise SourceError(f"has two arrays named {name!r}: it is damaged")
        names.add(name)
        with archive.open(info) as stream:
            array = _read_header(stream)
            begin = stream.tell()
        if not array.dtype.hasobject and begin + array.bytes != info.file_size:
            found = info.file_size - begin
            raise SourceError(
                f"has {found} bytes of {name!r}, whose header declares {array.bytes}: it is damaged"
            )
        yield name, array


def _read_header(stream: IO[bytes]) -> _Array:
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"an array is in format {version}, known are {list(_HEADERS)}")
    try:
        shape, is_transposed, dtype = _HEADERS[version](stream, max_header_size=_LONGEST_HEADER)
    except Exception as error:  # numpy evaluates a literal, which fails in a dozen ways
        raise ValueError(f"the header of an array is damaged: {error or type(error).__name__}") from error
    if any(type(size) is not int or size < 0 for size in shape) or (
        math.prod(max(size, 1) for size in shape) > LARGEST_NUMEL
    ):
        raise ValueError(f"an array has the shape {shape}")
    return _Array(tuple(shape), dtype, is_transposed)


def _entry(path: Path, name: str, array: _Array, state: FileState) -> Entry:
    dtype = torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype
    return Entry(array.shape, dtype, partial(_read_array, path, name, array, state))


def _read_array(path: Path, name: str, array: _Array, state: FileState) -> Tensor:
    values = np.empty(array.bytes, np.uint8)
    try:
        with reopened(path, name, state) as file, zipfile.ZipFile(file) as archive:
            members = set(archive.namelist())
            with archive.open(f"{name}.npy" if f"{name}.npy" in members else name) as stream:
                _read_header(stream)
                for place in range(0, len(values), _PIECE):
                    part = stream.read(min(_PIECE, len(values) - place))
                    values[place : place + len(part)] = np.frombuffer(part, np.uint8)
                    if len(part) < min(_PIECE, len(values) - place):
                        raise EOFError("the array ends too early")
    except _FAILURES as error:
        raise SourceError(f"array {name!r} of {path} is damaged: {error or type(error).__name__}") from error
    shape = array.shape[::-1] if array.is_transposed else array.shape
    found = values.view(array.dtype).astype(array.dtype.newbyteorder("="), copy=False).reshape(shape)
    return torch.from_numpy(found.T.copy() if array.is_transposed else found)
