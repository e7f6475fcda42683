"""Where results go: never over a file that is being read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from factorpack.errors import PlanError, SourceError


def check_output(output: Path, *inputs: str | Path | None) -> None:
    """Raises PlanError where writing `output` would replace a file that belongs to an input.

    Files are compared by identity and not by name: links are followed, and hard links count. Inputs that do
    not exist, or None, are left to their reader.
    """
    if not output.name:
        raise SourceError(f"{output} is a folder, expected a file to write")
    if not output.exists():
        return
    for given in inputs:
        for file in _files_of(Path(given)) if given is not None else ():
            if os.path.samefile(output, file):
                raise PlanError(f"{output} is read by this command ({file}): choose another file to write")


def make_folder(folder: Path) -> None:
    """Makes a folder to write into, and those it is in; SourceError where a file has its name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise SourceError(
            f"{folder} cannot be a folder: a file has its name, or that of one it is in"
        ) from error


def _files_of(path: Path) -> Iterator[Path]:
    """Every file that an input consists of: itself, all in a folder, or an index and its shards."""
    if path.is_dir():
        yield from (each for each in path.rglob("*") if each.is_file())
    elif path.is_file():
        yield path
        if path.name.endswith(".index.json"):
            yield from (shard for shard in map(path.parent.joinpath, _shard_names(path)) if shard.is_file())


def _shard_names(index: Path) -> set[str]:
    """The shards that an index names; none where it is damaged, which its reader reports."""
    try:
        return {
            name
            for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            if isinstance(name, str)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
