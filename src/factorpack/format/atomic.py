"""Files that are either the old one or the whole new one, whenever the writer is killed."""

from __future__ import annotations

import os
import secrets
import shutil
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


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty sibling folder to fill, renamed to `path` once the block has ended well; nothing of it otherwise."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already: name another folder, or remove it")
    sibling = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    sibling.mkdir()
    try:
        yield sibling
        for each in sibling.rglob("*"):
            if each.is_file():
                with each.open("rb") as file:
                    os.fsync(file.fileno())
        if path.exists():
            path.rmdir()  # empty: not every system renames onto a folder
        sibling.rename(path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(sibling, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
