"""Files that a run keeps for itself and reads back: their first line is a checksum of all that follows.

What such a file was made from is part of its content, or of a name that is, so that the checksum covers it.
A file of JSON stays one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from factorpack.errors import FormatError, SourceError
from factorpack.format.atomic import atomic_write

_BYTES = (b"factorpack state, SHA-256 ", b"\n")
_JSON = (b'{"checksum": "', b'",\n')
_SHOWN = 40
"""Bytes of a foreign file that an error shows."""


def write_checked(path: Path, content: bytes | memoryview) -> None:
    """Writes bytes, whole or not at all."""
    _write(path, content, *_BYTES)


def read_checked(path: Path) -> bytes:
    """The bytes as they were written; FormatError where they are damaged, SourceError where it is another's file."""
    return _read(path, *_BYTES)


def write_checked_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON object, with its checksum as one more field."""
    _write(path, json.dumps(document, indent=1).encode().removeprefix(b"{\n"), *_JSON)


def read_checked_json(path: Path) -> dict[str, Any]:
    """The object as it was written, else an error as of `read_checked`."""
    document: dict[str, Any] = json.loads(b"{" + _read(path, *_JSON))
    return document


def say_damaged(path: Path, what: str, error: Exception | str) -> None:
    """Warns that a kept file is not used, and what is made again instead."""
    warnings.warn(f"{path} is damaged, so {what} is made again: {error}", stacklevel=3)


def _write(path: Path, content: bytes | memoryview, before: bytes, after: bytes) -> None:
    with atomic_write(path) as file:
        file.write(before + _checksum(content) + after)
        file.write(content)


def _read(path: Path, before: bytes, after: bytes) -> bytes:
    with path.open("rb") as file:
        first = file.read(max(_SHOWN, _line_bytes(before, after)))
        if not first.startswith(before):
            raise SourceError(f"it begins with {first[:_SHOWN]!r}, expected {before.decode()!r}")
        file.seek(_line_bytes(before, after))
        content = file.read()
    if not first.startswith(before + _checksum(content) + after):
        raise FormatError("the checksum does not match")
    return content


def _line_bytes(before: bytes, after: bytes) -> int:
    return len(before) + 2 * hashlib.sha256().digest_size + len(after)


def _checksum(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
