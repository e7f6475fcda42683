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

from factorpack.checkpoints.entry import Entry
from factorpack.engine import Engine, Task, run_tasks
from factorpack.errors import FormatError, PlanError, SourceError, while_compressing
from factorpack.format.atomic import rename
from factorpack.format.checked_file import say_damaged
from factorpack.format.container import Reader, check_target
from factorpack.format.locks import locked
from factorpack.format.packed_file import assemble, write_packed
from factorpack.format.schema import VERSION
from factorpack.planning.rules import Choice
from factorpack.progress import Showing
from factorpack.record import Encoded
from factorpack.source import Source, checksum_of, open_source
from factorpack.version import __version__
from factorpack.weight import Weight

BASE_BYTES = 320 << 20
"""Memory of an interpreter that has imported torch."""
WORKING_BYTES, KEPT_BYTES = 60, 10
"""Peak memory per element of a tensor while it is coded, or kept, for most methods: docs/results/scale.md."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, as a worker finds it."""

    checkpoint: Path
    name: str
    checksum: str
    """Of its values as the driver saw them, to notice if they change on the way."""
    key: str | None = None
    """The name in a torch file under which it is."""


def compress_per_tensor(
    path: Path, source: object, plan: Mapping[str, Choice], opened: Source, engine: Engine, progress: Showing
) -> None:
    """Writes the file that one process would write, by tasks of an engine."""
    checkpoint = checkpoint_path(source)
    target = path.absolute()  # a worker may run in another folder
    with work_folder(target) as folder:
        checksums = checksums_of(opened)
        files = {
            name: folder / work_file_name(checksums[name], name, choice) for name, choice in plan.items()
        }
        tasks = [
            Task(
                name,
                encode_tensor,
                (StoredTensor(checkpoint, name, checksums[name], opened.key), choice, files[name]),
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
    with while_compressing(stored.name):
        encoded = choice.encode(read_stored(stored))
    write_part(file, stored.name, encoded)


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


def checksums_of(opened: Source) -> dict[str, str]:
    """For each tensor, what its parts are recognised by: the checkpoint is read once from end to end."""
    return {name: checksum_of(entry.load()) for name, entry in opened.entries.items()}


def work_file_name(*depends_on: object) -> str:
    """A file name made of all that the file's bytes depend on."""
    key = repr((*depends_on, VERSION, __version__, torch.__version__))
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.part"


def read_stored(stored: StoredTensor) -> Weight:
    """The weight a worker codes; an error where it is not the one the driver saw."""
    for _ in range(2):
        with suppress(SourceError):
            source = _open_once(stored.checkpoint, stored.key)
            weight = source.weight(stored.name) if stored.name in source.entries else None
            if weight is not None and checksum_of(weight.values) == stored.checksum:
                return weight
        _open_once.cache_clear()  # a worker that has served another run knows the checkpoint as it was then
    raise SourceError(
        f"{stored.name!r} of {stored.checkpoint} has changed while it was being compressed: start again"
    )


def write_part(file: Path, name: str, encoded: Encoded) -> None:
    """Writes a tensor as a packed file, which says beside it what it was made from."""
    nothing = Encoded("keep", (0,), torch.uint8, {"values": torch.empty(0, dtype=torch.uint8)})
    write_packed(file, [(name, encoded), (_origin(file), nothing)], {})


def is_whole(file: Path, name: str) -> bool:
    """Whether a part is there and is that tensor's, made from what its name says; a damaged one is reported."""
    if not file.exists():
        return False
    try:
        if list(found := Reader(file)) == [name, _origin(file)]:
            return True
        raise FormatError(f"it holds {sorted(found)[:2]}, which is another part")
    except FormatError as error:
        say_damaged(file, repr(name), error)
        return False


def _origin(file: Path) -> str:
    """An entry with the name of its file, so that no other file is taken for it."""
    return f"made from:{file.stem}"


def peak_bytes(entry: Entry, choice: Choice) -> int:
    """About the most memory a worker needs for a tensor."""
    return BASE_BYTES + entry.numel * (KEPT_BYTES if choice.method.keeps else WORKING_BYTES)


@lru_cache(maxsize=1)
def _open_once(checkpoint: Path, key: str | None) -> Source:
    """Once per worker: the headers of a checkpoint in many shards take a while."""
    return open_source(checkpoint, key)
