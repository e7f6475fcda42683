"""Tensors of a plain safetensors file, in the natural order of their names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from factorpack.checkpoints.entry import Entry, FileState, read_into, reopened, state_of
from factorpack.checkpoints.weight_names import natural_key
from factorpack.errors import SourceError
from factorpack.format.container import METADATA_KEY, SAFETENSORS_TYPES

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


def read_safetensors(path: Path) -> Iterator[tuple[str, Entry]]:
    try:
        with safe_open(path, framework="pt") as file:  # which checks the header against the file
            if METADATA_KEY in (file.metadata() or {}):
                raise SourceError(f"{path} is already a packed file: decode it first")
        state, start, header = _read_header(path)
    except (SafetensorError, OSError) as error:
        reason = error if path.stat().st_size else "it is empty"
        raise SourceError(f"{path} is not a whole safetensors file: {reason}") from error
    header.pop("__metadata__", None)
    for name in sorted(header, key=natural_key):
        kind, shape = header[name]["dtype"], tuple(header[name]["shape"])
        if kind not in _DTYPES:
            raise SourceError(f"tensor {name!r} of {path} has the unknown type {kind}")
        dtype, place = _DTYPES[kind], start + header[name]["data_offsets"][0]
        yield name, Entry(shape, dtype, partial(_read_tensor, path, name, shape, dtype, place, state))


def _read_header(path: Path) -> tuple[FileState, int, dict[str, Any]]:
    """The state of a file, where its data start, and its entries: read once, however many tensors there are."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return state_of(file), 8 + size, json.loads(file.read(size))


def _read_tensor(
    path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, place: int, state: FileState
) -> Tensor:
    values = torch.empty(shape, dtype=dtype)
    with reopened(path, name, state) as file:
        file.seek(place)
        read_into(file, values)
    return values
