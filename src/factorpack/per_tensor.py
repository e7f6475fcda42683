"""Compression in parts: a task and a file a tensor, put together at the end; a killed run goes on.

A part is a packed file of one tensor, under a name made of all that its bytes depend on. Parts are written
whole or not at all, and two workers that make the same part write the same bytes: nothing that a killed or
a second worker does can spoil one. The driver only plans, copies streams and gives the result its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from factorpack.engine import Engine, Task, outcomes
from factorpack.errors import FormatError, PlanError, SourceError, while_compressing
from factorpack.format.atomic import rename
from factorpack.format.container import Reader, check_target
from factorpack.format.locks import locked
from factorpack.format.packed_file import assemble, write_packed
from factorpack.format.schema import VERSION
from factorpack.methods import Keep
from factorpack.planning.rules import Choice
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.source import Entry, Source, file_mark, open_source

BASE_BYTES = 320 << 20
"""An interpreter with torch in it."""
WORKING_BYTES, KEPT_BYTES = 60, 10
"""Bytes per element while it is coded, or kept: the most of any method measured in docs/results/scale.md."""


@dataclass(frozen=True, slots=True)
class Piece:
    """All that a worker is told of a tensor: where it stands, what to make of it, where to put that."""

    source: Path
    name: str
    choice: Choice
    mark: str
    """Of the file it stands in, to notice if that changes on the way."""
    part: Path


def encode(
    name: str, source: Source, choice: Choice, sample: LayerSample | LayerMoments | None = None
) -> Encoded:
    """One tensor by its choice of method; errors say which it was."""
    with while_compressing(name):
        weight = source.entries[name].load()
        encoded = choice.method.encode(weight, source.transposed_groups.get(name, 0), sample)
    return encoded.noted(choice.note)


def compress_in_parts(
    path: Path, source: object, plan: Mapping[str, Choice], opened: Source, engine: Engine, progress: bool
) -> None:
    """Writes the file that one process would write, by tasks of an engine; see the module."""
    checkpoint = path_of(source)
    target = path.absolute()  # a worker may stand in another folder
    with work_folder(target) as folder:
        pieces = pieces_of(checkpoint, plan, opened, folder)
        tasks = [
            _task(piece, opened.entries[name])
            for name, piece in pieces.items()
            if not is_whole(piece.part, name)
        ]
        for _ in outcomes(engine, tasks, "compressing", progress):
            pass
        assemble(folder / "whole.part", {name: piece.part for name, piece in pieces.items()}, opened.aliases)
        rename(folder / "whole.part", target)


def path_of(source: object) -> Path:
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
        folder = path.with_name(f"{path.name}.parts")
        folder.mkdir(exist_ok=True)
        try:
            yield folder
            for pattern in ("*.part", ".*.tmp"):  # a stranger's files stay
                for file in folder.glob(pattern):
                    file.unlink()
        finally:
            with suppress(OSError):
                folder.rmdir()


def pieces_of(source: Path, plan: Mapping[str, Choice], opened: Source, folder: Path) -> dict[str, Piece]:
    """A piece a tensor, in the plan's order."""
    marks = marks_of(opened)
    return {
        name: Piece(source, name, choice, marks[name], folder / part_name(marks[name], name, choice))
        for name, choice in plan.items()
    }


def marks_of(opened: Source) -> dict[str, str]:
    """Of the file each tensor stands in."""
    files = {name: _file_of(entry) for name, entry in opened.entries.items()}
    marks = {file: file_mark(file) for file in set(files.values())}
    return {name: marks[file] for name, file in files.items()}


def part_name(*depends_on: object) -> str:
    """A file name made of all that a part's bytes depend on."""
    told = repr((*depends_on, VERSION, torch.__version__))
    return f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.part"


def _task(piece: Piece, entry: Entry) -> Task:
    return Task(piece.name, make_part, (piece,), need_bytes(entry, piece.choice), entry.numel)


def make_part(piece: Piece) -> None:
    """A worker's task: reads one tensor, codes it, and leaves it as a packed file of its own."""
    with unchanged(piece.source, piece.name, piece.mark) as source:
        encoded = encode(piece.name, source, piece.choice)
    write_packed(piece.part, [(piece.name, encoded)], {})


@contextmanager
def unchanged(checkpoint: Path, name: str, mark: str) -> Iterator[Source]:
    """The checkpoint a worker reads a tensor from; an error where it is not the one the driver saw."""
    source = _opened(checkpoint)
    if name not in source.entries:
        raise SourceError(f"{checkpoint} has no tensor {name!r} any more")
    yield source
    if file_mark(_file_of(source.entries[name])) != mark:
        raise SourceError(f"{checkpoint} has changed while it was being compressed: start again")


def is_whole(part: Path, name: str) -> bool:
    """Whether a part is there, unharmed, and of that tensor."""
    try:
        return list(Reader(part)) == [name]
    except FormatError:
        return False


def need_bytes(entry: Entry, choice: Choice) -> int:
    """The most memory a worker needs for a tensor, about."""
    return BASE_BYTES + entry.numel * (KEPT_BYTES if isinstance(choice.method, Keep) else WORKING_BYTES)


@lru_cache(maxsize=1)
def _opened(source: Path) -> Source:
    """Once a worker: the headers of a checkpoint in many shards take a while."""
    return open_source(source)


def _file_of(entry: Entry) -> Path:
    assert entry.file is not None, "entries of a checkpoint on disk know their file"
    return entry.file
