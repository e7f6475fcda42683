"""Compression as one task per tensor: each leaves a file, and the files are joined at the end.

A tensor's file is a packed file of that tensor alone, under a name made of all that its bytes depend on. It
is written whole or not at all, and two workers that make the same file write the same bytes: nothing that a
killed or a second worker does can spoil one. A killed run goes on from the files that are there. The driver
only plans, copies streams and renames the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from factorpack.engine import Engine, Task, run_tasks
from factorpack.errors import FormatError, PlanError, SourceError, while_compressing
from factorpack.format.atomic import rename
from factorpack.format.container import Reader, check_target
from factorpack.format.locks import locked
from factorpack.format.packed_file import assemble, write_packed
from factorpack.format.schema import VERSION
from factorpack.planning.rules import Choice
from factorpack.source import Entry, Source, file_fingerprint, open_source

BASE_BYTES = 320 << 20
"""Memory of an interpreter that has imported torch."""
WORKING_BYTES, KEPT_BYTES = 60, 10
"""Peak memory per element of a tensor while it is coded, or kept, for most methods: docs/results/scale.md."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, as a worker finds it."""

    checkpoint: Path
    name: str
    mark: str
    """The state of the file that holds it, to notice if it changes on the way."""


def compress_per_tensor(
    path: Path, source: object, plan: Mapping[str, Choice], opened: Source, engine: Engine, progress: bool
) -> None:
    """Writes the file that one process would write, by tasks of an engine."""
    checkpoint = checkpoint_path(source)
    target = path.absolute()  # a worker may run in another folder
    with work_folder(target) as folder:
        marks = file_marks(opened)
        files = {name: folder / work_file_name(marks[name], name, choice) for name, choice in plan.items()}
        tasks = [
            Task(
                name,
                encode_tensor,
                (StoredTensor(checkpoint, name, marks[name]), choice, files[name]),
                peak_bytes(opened.entries[name], choice),
                opened.entries[name].numel,
            )
            for name, choice in plan.items()
            if not is_whole(files[name], name)
        ]
        for _ in run_tasks(engine, tasks, "compressing", progress):
            pass
        join_files(folder, files, opened, target)


def encode_tensor(stored: StoredTensor, choice: Choice, file: Path) -> None:
    """A worker's task: reads one tensor, codes it, and writes it as a packed file of its own."""
    with unchanged(stored) as source, while_compressing(stored.name):
        encoded = choice.encode(source.weight(stored.name))
    write_packed(file, [(stored.name, encoded)], {})


def join_files(folder: Path, files: Mapping[str, Path], opened: Source, target: Path) -> None:
    """One packed file of all tensors, under its name only when it is whole."""
    assemble(folder / "whole.part", files, opened.aliases)
    rename(folder / "whole.part", target)


def checkpoint_path(source: object) -> Path:
    """A checkpoint that workers can open too."""
    if not isinstance(source, str | Path):
        raise PlanError(
            f"the source is a {type(source).__name__}, and an engine's workers open it themselves: "
            "give the path of a checkpoint, or leave the engine out"
        )
    return Path(source).absolute()


@contextmanager
def work_folder(path: Path) -> Iterator[Path]:
    """The folder `path`.parts, for one run at a time: removed when the block ends well, else kept for the next."""
    check_target(path)
    with locked(path):
        folder = parts_folder(path)
        folder.mkdir(exist_ok=True)
        try:
            yield folder
            for pattern in ("*.part", ".*.tmp"):  # files of others stay
                for file in folder.glob(pattern):
                    file.unlink()
        finally:
            with suppress(OSError):
                folder.rmdir()


def parts_folder(path: Path) -> Path:
    """Where a run that writes `path` keeps what it has finished."""
    return path.with_name(f"{path.name}.parts")


def file_marks(opened: Source) -> dict[str, str]:
    """For each tensor, the state of the file that holds it."""
    files = {name: _file_of(entry) for name, entry in opened.entries.items()}
    marks = {file: file_fingerprint(file) for file in set(files.values())}
    return {name: marks[file] for name, file in files.items()}


def work_file_name(*depends_on: object) -> str:
    """A file name made of all that the file's bytes depend on."""
    key = repr((*depends_on, VERSION, torch.__version__))
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.part"


@contextmanager
def unchanged(stored: StoredTensor) -> Iterator[Source]:
    """The checkpoint a worker reads a tensor from; an error where it is not the one the driver saw."""
    source = _open_once(stored.checkpoint)
    if stored.name not in source.entries:
        raise SourceError(f"{stored.checkpoint} has no tensor {stored.name!r} any more")
    yield source
    if file_fingerprint(_file_of(source.entries[stored.name])) != stored.mark:
        raise SourceError(f"{stored.checkpoint} has changed while it was being compressed: start again")


def is_whole(file: Path, name: str) -> bool:
    """Whether a file is there, undamaged, and holds that tensor."""
    try:
        return list(Reader(file)) == [name]
    except FormatError:
        return False


def peak_bytes(entry: Entry, choice: Choice) -> int:
    """About the most memory a worker needs for a tensor."""
    return BASE_BYTES + entry.numel * (KEPT_BYTES if choice.method.keeps else WORKING_BYTES)


@lru_cache(maxsize=1)
def _open_once(checkpoint: Path) -> Source:
    """Once per worker: the headers of a checkpoint in many shards take a while."""
    return open_source(checkpoint)


def _file_of(entry: Entry) -> Path:
    assert entry.file is not None, "entries of a checkpoint on disk know their file"
    return entry.file
