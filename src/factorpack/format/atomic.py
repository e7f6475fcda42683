"""Files that are either the old one or the complete new one, whenever the writer is killed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from factorpack.format.locks import is_same_file, lock


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a sibling file for writing and renames it to `path` once the block has succeeded.

    The sibling is locked while it is written. One that no process holds is left from a killed writer, and
    the next writer of the same file removes it.
    """
    if not path.name or path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a file to write")
    _remove_abandoned(path)
    begun: list[Path] = []
    handle = None
    try:
        sibling, handle = _begin(path, begun)
        with sibling.open("r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(sibling, path)
    except OSError as error:  # an error about a full disk does not name the file
        error.add_note(f"while writing {path}")
        raise
    finally:
        for sibling in begun:
            sibling.unlink(missing_ok=True)
        if handle is not None:
            os.close(handle)


def rename(complete: Path, path: Path) -> None:
    """Gives a complete file on disk its final name."""
    os.replace(complete, path)
    _sync_folder(path.parent)


def _begin(path: Path, begun: list[Path]) -> tuple[Path, int | None]:
    """An empty sibling, and the handle whose lock marks it as in use; None where there are no locks.

    `begun` takes its name before it is there: a signal may end this function as soon as it is.
    """
    while True:
        sibling = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        begun.append(sibling)
        handle = os.open(sibling, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        taken = lock(handle)
        if taken is None:
            os.close(handle)
            return sibling, None
        if taken and is_same_file(handle, sibling):
            return sibling, handle
        os.close(handle)  # another writer has just removed it as abandoned


def _remove_abandoned(path: Path) -> None:
    for sibling in path.parent.iterdir():
        if sibling.name.startswith(f".{path.name}.") and sibling.name.endswith(".tmp"):
            with suppress(OSError):  # gone already, or another user's
                is_folder = sibling.is_dir()
                handle = os.open(sibling, os.O_RDONLY if is_folder else os.O_RDWR)
                try:
                    if lock(handle):
                        shutil.rmtree(sibling) if is_folder else sibling.unlink()
                finally:
                    os.close(handle)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, removed when the block ends.

    It is locked meanwhile, and one left from a killed writer is removed by the next one.
    """
    _remove_abandoned(path)
    sibling = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    handle = None
    try:
        sibling.mkdir()
        handle = os.open(sibling, os.O_RDONLY) if hasattr(os, "O_DIRECTORY") else None
        if handle is not None:
            lock(handle)
        yield sibling
    finally:
        shutil.rmtree(sibling, ignore_errors=True)
        if handle is not None:
            os.close(handle)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty sibling folder to fill, renamed to `path` once the block has succeeded, and otherwise removed."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} already exists: name another folder, or remove it")
    with scratch_folder(path) as sibling:
        yield sibling
        for each in sibling.rglob("*"):
            if each.is_file():
                with each.open("rb") as file:
                    os.fsync(file.fileno())
        if path.exists():
            path.rmdir()  # empty: not every system renames onto a folder
        sibling.rename(path)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
