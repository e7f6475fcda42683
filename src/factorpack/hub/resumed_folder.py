"""A packed folder whose packed file takes long to make: a run that was ended is continued, or found finished.

The packed file is made beside the folder. Once it is whole, a hidden record names what it was made from. Both
go when the folder stands under its name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from factorpack.calibration.model_folder import CONFIG, PACKED_FILE, Folder
from factorpack.errors import FormatError, SourceError
from factorpack.format.checked_file import read_checked_json, say_damaged, write_checked_json
from factorpack.format.locks import locked
from factorpack.hub.save import write_folder
from factorpack.packed import Packed, load
from factorpack.source import checksum_of, open_source
from factorpack.version import __version__


def resume_folder(
    target: Path, like: Folder, write: Callable[[Path], object], identify: Callable[[], str]
) -> Packed:
    """Writes a packed folder as `write_folder` does, or finds it written.

    `identify` returns a checksum of all that it depends on.
    """
    identity = cache(identify)  # it reads the model, so a target that is refused comes first
    beside = target.with_name(f"{target.name}.packed.safetensors")
    record = target.with_name(f".{target.name}.finished")

    def put(path: Path) -> None:
        if not _is_recorded(beside, record, identity):
            write(beside)
            write_checked_json(record, {"made from": identity(), "packed": checksum_of_file(beside)})
        try:
            os.link(beside, path)  # it stays until the folder has its name
        except OSError:  # a file system without links
            shutil.copyfile(beside, path)

    with locked(target):
        if not _is_recorded(target / PACKED_FILE, record, identity):
            write_folder(target, like, put)
        for finished in (beside, record):
            finished.unlink(missing_ok=True)
        return load(target / PACKED_FILE)


def identify_run(like: Folder, *settings: object, inputs: tuple[Path | None, ...] = ()) -> str:
    """A checksum of what a folder is made from: every tensor and file of `like`, settings, and input files."""
    found = hashlib.sha256(repr((__version__, settings)).encode())
    for name, entry in open_source(like.path).entries.items():
        found.update(f"{name} {checksum_of(entry.load())}".encode())
    for file in [like.path / CONFIG, *(like.path / name for name in like.side_files())]:
        found.update(f"{file.name} {checksum_of_file(file)}".encode())
    for given in inputs:
        for file in _files_of(given):
            found.update(f"{file.name} {checksum_of_file(file)}".encode())
    return found.hexdigest()


def checksum_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_recorded(packed: Path, record: Path, identity: Callable[[], str]) -> bool:
    """Whether a packed file is the one that a run of this kind recorded as its result."""
    if not packed.is_file() or not record.is_file():
        return False
    try:
        kept = read_checked_json(record)
        if kept["made from"] != identity():
            return False
        if kept["packed"] != checksum_of_file(packed):
            raise FormatError(f"{packed.name} is not the file that was finished")
    except (FormatError, SourceError) as error:
        say_damaged(record, packed.name, error)
        return False
    return True


def _files_of(given: Path | None) -> Iterator[Path]:
    if given is not None and given.is_dir():
        yield from sorted(each for each in given.rglob("*") if each.is_file())
    elif given is not None and given.is_file():
        yield given
