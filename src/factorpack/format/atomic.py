"""Files that are either the old one or the whole new one, whenever the writer is killed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a sibling file for writing and renames it to `path` once the block has ended well."""
    sibling = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with sibling.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(sibling, path)
        _sync_folder(path.parent)
    finally:
        sibling.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
