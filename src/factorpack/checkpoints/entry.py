"""A tensor that waits in its file, and what is said of how a file was read."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from factorpack.errors import SourceError

FileState = tuple[int, ...]
LARGEST_NUMEL = 1 << 48
"""Elements of a tensor, sizes of zero aside. More fit no file, and some libraries count no further."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Note:
    """A line about how a file was read. It is a warning where someone could have expected other weights."""

    text: str
    level: int = logging.INFO


def list_names(names: list[str], most: int = 6) -> str:
    """Names for a sentence: the first few, and how many more there are."""
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def state_of(file: BinaryIO) -> FileState:
    """What changes when a file does."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def reopened(path: Path, name: str, state: FileState) -> Iterator[BinaryIO]:
    """The file of a tensor, as it was when its header was read.

    It is opened for each tensor: a mapped file that stays open keeps every page it has read resident.
    """
    try:
        with path.open("rb") as file:
            if state_of(file) != state:
                raise SourceError(f"{path} has changed since it was opened: start again")
            yield file
    except OSError as error:
        raise SourceError(f"tensor {name!r} can no longer be read from {path}: {error}") from error


def read_into(file: BinaryIO, values: Tensor) -> None:
    """Fills a tensor with the next bytes of a file."""
    if values.numel():
        buffer = memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise OSError("the file ends too early")
