"""An open safetensors file: a header that has been checked, and bytes as they are when they are read.

Nothing is mapped into memory. Where a file is cut short while it is mapped, reading what was cut off ends the
process.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from factorpack.errors import FormatError
from factorpack.format.untrusted_json import count_header, parse_counted, short

METADATA = "__metadata__"
ZIP, GGUF = b"PK\x03\x04", b"GGUF"
LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
"""How other files begin. `torch.save` put a pickled number of its own first before it wrote zip archives."""
_MOST_READ = 1 << 30
"""Bytes that are read at a time: some systems read no more than 2 GB."""
_LOCK = threading.Lock()


class SafetensorsFile:
    """Stays open, so that a file renamed onto its path changes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            inside = sorted(path.glob("*.packed.safetensors"))
            there = f": the packed file in it is {inside[0]}" if len(inside) == 1 else ""
            raise FormatError(f"{path} is a folder, expected a file{there}")
        if not path.is_file():
            raise FormatError(f"there is no file {path}")
        try:
            self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, self._handle)
            self.bytes = os.fstat(self._handle).st_size
            length = int.from_bytes(self.read(0, min(self.bytes, 8)), "little")
            if 8 + length <= self.bytes:  # safetensors says what is wrong with another
                _check_extent(self, length)
            with safe_open(path, framework="numpy"):
                pass  # the offsets are sound
            if not os.path.samestat(os.fstat(self._handle), os.stat(path)):
                raise FormatError(f"{path} was replaced while it was opened: open it again")
        except (SafetensorError, OSError) as error:
            other = _other_kind(path)
            if other is not None:
                raise FormatError(
                    f"{path} is not a packed file: it is {other}, and `factorpack compress` packs checkpoints"
                ) from error
            raise FormatError(f"{path} is not a complete safetensors file: {error}") from error
        # safetensors takes a name that appears twice, and uses the last.
        header = parse_counted(self._header(length))
        if not isinstance(header, dict):
            raise FormatError(f"the header of {path} is {short(header)}, expected a table")
        self.metadata: dict[str, Any] = _named(header.pop(METADATA, None) or {})  # null is the same as none
        self.entries: dict[str, Any] = _named(header)
        self.first = 8 + length
        """Where the entries begin; their offsets count from here."""

    def _header(self, length: int) -> str:
        """Its text. Bytes beyond ASCII stand for themselves: one character of four would widen all others."""
        return self.read(8, length).rstrip(b" ").decode("ascii", "surrogateescape")

    def read(self, start: int, count: int) -> bytes:
        found = []
        while count:
            piece = _read_at(self._handle, start, min(count, _MOST_READ))
            if not piece:
                raise FormatError(f"{self.path} has been cut short: it ends before byte {start}")
            found.append(piece)
            start, count = start + len(piece), count - len(piece)
        return b"".join(found)


def _other_kind(path: Path) -> str | None:
    """What a file is that people take for a packed one."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        return None
    return next((words for start, words in _BEGINNINGS.items() if head.startswith(start)), None)


_BEGINNINGS = {
    ZIP: "a torch file or another archive",
    LEGACY_TORCH[:4]: "a torch file",
    GGUF: "a GGUF file",
}


def _check_extent(file: SafetensorsFile, length: int) -> None:
    """Refuses a header that safetensors would take much memory to parse."""
    try:
        count_header(file.read(8, length), file.bytes)
    except FormatError as error:
        raise FormatError(
            f"{file.path} is not a complete safetensors file of packed tensors: {error}"
        ) from error


def _named(table: dict[str, Any]) -> dict[str, Any]:
    """The table with the names that are in the file, after `_header`."""
    try:
        return {key.encode(errors="surrogateescape").decode(): value for key, value in table.items()}
    except UnicodeError as error:
        raise FormatError(f"the metadata is not valid JSON: {error}") from error


def _read_at(handle: int, start: int, count: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(handle, count, start)
    with _LOCK:
        os.lseek(handle, start, os.SEEK_SET)
        return os.read(handle, count)
