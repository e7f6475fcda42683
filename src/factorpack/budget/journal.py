"""What a run has finished, in a folder beside its file: the same run, started again, takes it from there.

Each finished piece of work is a packed file, under a name made of all that its content depends on. It is
written whole or not at all, and its checksums are verified when it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from factorpack.budget.planner import Planner
from factorpack.budget.tensors import Tensors
from factorpack.calibration.calibrate import Calibration
from factorpack.errors import FormatError
from factorpack.format.checked_file import say_damaged
from factorpack.format.container import Reader
from factorpack.format.encode_ahead import Streams
from factorpack.format.packed_file import write_packed
from factorpack.format.streams import raw_bytes
from factorpack.methods import Keep
from factorpack.per_tensor import work_file_name
from factorpack.record import Encoded
from factorpack.source import checksum_of
from factorpack.version import __version__
from factorpack.weight import Weight

MOST_WAITING = 8
"""Pieces of work that wait to be written; a killed run loses as many at most."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """What one piece of work found."""

    document: Mapping[str, Any]
    """Numbers and texts, as JSON holds them."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    encoded: Encoded | None = None
    """A weight's codes."""

    def on_cpu(self) -> Finished:
        """The same in host memory; tensors are copied, since those of a network change later."""
        tensors = {name: value.to("cpu", copy=True) for name, value in self.tensors.items()}
        return Finished(self.document, tensors, None if self.encoded is None else self.encoded.to("cpu"))

    def checksum(self) -> str:
        """Of all its values, for what depends on them."""
        found = hashlib.sha256(json.dumps(self.document).encode())
        parts = {} if self.encoded is None else self.encoded.parts
        for name, value in [*self.tensors.items(), *parts.items()]:
            found.update(f"{name} {checksum_of(value)}".encode())
        return found.hexdigest()


class Journal:
    """Keeps finished work in a folder and finds it again; without a folder it does neither."""

    def __init__(self, folder: Path | None = None, mark: str = "", writer: _Writer | None = None) -> None:
        """`mark` stands for all that the work depends on. Without a writer, files are written at once."""
        self._folder, self._mark, self._writer = folder, mark, writer

    def after(self, *depends_on: object) -> Journal:
        """A journal of work that depends on more than the work in this one."""
        return Journal(self._folder, work_file_name(self._mark, *depends_on), self._writer)

    def after_finished(self, name: str, finished: Finished) -> Journal:
        """A journal of work that depends on a finished piece, bit for bit."""
        return self if self._folder is None else self.after(name, finished.checksum())

    def find(self, name: str, streams: Streams | None = None) -> Finished | None:
        """What an earlier run has finished; None, with a warning, where its file is damaged.

        `streams` takes the stream of its codes, so that they are not encoded again.
        """
        if self._folder is None or not (file := self._file(self._folder, name)).exists():
            return None
        try:
            return _read(Reader(file), name, streams)
        except FormatError as error:
            say_damaged(file, repr(name), error)
            return None

    def keep(self, name: str, finished: Finished, streams: Streams | None = None) -> None:
        """Writes a finished piece of work; `streams` takes the streams that are made for it."""
        if self._folder is None:
            return
        finished = finished.on_cpu()
        if self._writer is None:
            self._write(self._folder, name, finished, streams)
        else:
            self._writer.submit(self._write, self._folder, name, finished, streams)

    def _write(self, folder: Path, name: str, finished: Finished, streams: Streams | None) -> None:
        document = torch.frombuffer(bytearray(json.dumps(finished.document).encode()), dtype=torch.uint8)
        file = self._file(folder, name)
        kept = {_document_name(name, file): document} | {
            _tensor_name(name, key): value for key, value in finished.tensors.items()
        }
        tensors = {key: Keep().encode(Weight(value)) for key, value in kept.items()}
        if finished.encoded is not None:
            tensors[name] = finished.encoded
        write_packed(file, tensors.items(), {}, streams)

    def _file(self, folder: Path, name: str) -> Path:
        return folder / work_file_name(self._mark, name)


NOTHING_KEPT = Journal()


@contextmanager
def open_journal(
    folder: Path | None, tensors: Tensors, planner: Planner, calibration: Calibration | None
) -> Iterator[Journal]:
    """The journal of a budget for these weights, this planner and these calibration data.

    A thread writes what is kept while the caller goes on; all of it is written when the block ends.
    """
    if folder is None:
        yield NOTHING_KEPT
        return
    with ThreadPoolExecutor(1) as pool:
        writer = _Writer(pool)
        yield Journal(folder, "", writer).after(identify(tensors, planner, calibration))
        writer.finish()


def identify(tensors: Tensors, planner: Planner, *data: Calibration | None) -> str:
    """A checksum of all that the work on a budget is made from: every weight and every input is read for it."""
    # The model's code cannot be compared, but its modules and their settings can.
    modules = _ADDRESS.sub("", repr(tensors.model))
    checksum = hashlib.sha256(repr((__version__, planner, modules, tensors.coded)).encode())
    for each in _content(tensors, data):
        checksum.update(each)
    return checksum.hexdigest()


class _Writer:
    """A thread that writes one file after the other; an error is raised when a later file is submitted."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._waiting: deque[Future[None]] = deque()

    def submit(self, write: Callable[..., None], *arguments: object) -> None:
        while len(self._waiting) >= MOST_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(write, *arguments))

    def finish(self) -> None:
        while self._waiting:
            self._waiting.popleft().result()


def _content(tensors: Tensors, data: Iterable[Calibration | None]) -> Iterator[bytes]:
    """The bytes of everything that is read."""
    for name, entry in tensors.source.entries.items():
        yield f"{name} {checksum_of(entry.load())}".encode()
    for name, encoded in tensors.fixed.items():
        yield f"{name} {encoded.kind} {encoded.bits} {encoded.by_caller}".encode()
        yield from map(raw_bytes, encoded.parts.values())
    for calibration in data:
        yield from content_of_batches(calibration.batches if calibration is not None else [])


def content_of_batches(batches: Iterable[Any]) -> Iterator[bytes]:
    """Checksums of batches: tensors, and whatever holds them."""
    for batch in batches:
        if isinstance(batch, Tensor):
            yield checksum_of(batch).encode()
        elif isinstance(batch, Mapping):
            yield repr(list(batch)).encode()
            yield from content_of_batches(batch.values())
        elif isinstance(batch, list | tuple):
            yield from content_of_batches(batch)
        else:
            yield repr(batch).encode()


def _read(reader: Reader, name: str, streams: Streams | None) -> Finished:
    key = _document_name(name, reader.path)
    if key not in reader:
        raise FormatError(f"it holds {sorted(reader)[:3]}, which is other work")
    document = json.loads(raw_bytes(_kept(reader, key)))
    start = _tensor_name(name, "")
    tensors = {key.removeprefix(start): _kept(reader, key) for key in reader if key.startswith(start)}
    encoded = reader.get(name)
    if encoded is not None and streams is not None:
        streams.keep(name, encoded, (reader.rows[name], reader.stream(name).tobytes()))
    return Finished(document, tensors, encoded)


def _kept(reader: Reader, key: str) -> Tensor:
    return reader[key].parts["values"]


# Names in the file: the codes have the weight's own, so that their stream can be copied; no other begins so.
def _document_name(name: str, file: Path) -> str:
    """With the name of its file, so that no other file is taken for it."""
    return f"{name}:document:{file.stem}"


def _tensor_name(name: str, key: str) -> str:
    return f"{name}:tensor:{key}"
