"""Tensors' rows and streams in order, encoded in advance: small models by threads, large ones by processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from factorpack.errors import FormatError
from factorpack.format.container import stored
from factorpack.format.encode_workers import EncodeCodes, are_running, encode_codes, encode_elsewhere
from factorpack.format.schema import TensorRow
from factorpack.record import Encoded

_MOST_TENSORS, _MOST_NUMEL = 8, 1 << 23
"""Tensors that wait, and their elements, per thread: encoding takes about five bytes per element."""

_LEAST_SENT, _MANY = 1 << 16, 1 << 22
"""Elements of a tensor that is worth sending to a worker, and of all tensors so far that are worth starting one."""

Stored = tuple[TensorRow, bytes]


class Streams:
    """Streams that have been made once, for a caller who measures a file before writing it.

    The last one of each name is held, with the very `Encoded` it was made from: no other one matches it.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[Encoded, Stored]] = {}

    def find(self, name: str, encoded: Encoded) -> Stored | None:
        held = self._held.get(name)
        return held[1] if held is not None and held[0] is encoded else None

    def keep(self, name: str, encoded: Encoded, made: Stored) -> None:
        self._held[name] = encoded, made


def encode_ahead(
    tensors: Iterable[tuple[str, Encoded]], threads: int, streams: Streams | None = None
) -> Iterator[Stored]:
    """`stored` of each tensor; what `streams` has is not encoded again, and what it lacks is added.

    The bytes do not depend on the number of threads. An error names its tensor, and is raised when that
    tensor's turn comes.
    """
    known = streams or Streams()
    if threads < 2:
        for name, encoded in tensors:
            made = known.find(name, encoded) or _stored(name, encoded, encode_codes)
            if streams is not None:
                streams.keep(name, encoded, made)
            yield made
        return
    with ThreadPoolExecutor(threads) as tasks:
        waiting: deque[tuple[str, Encoded, Future[Stored]]] = deque()
        seen = 0
        try:
            for name, encoded in tensors:
                while waiting and _is_enough([*(each for _, each, _ in waiting), encoded], threads):
                    yield _first(waiting, streams)
                seen += encoded.numel
                elsewhere = encoded.numel >= _LEAST_SENT and (are_running() or seen >= _MANY)
                encode = encode_elsewhere if elsewhere else encode_codes
                waiting.append((name, encoded, _start(name, encoded, known, tasks, encode)))
            while waiting:
                yield _first(waiting, streams)
        finally:
            for _, _, future in waiting:
                future.cancel()


def _is_enough(tensors: list[Encoded], threads: int) -> bool:
    many = sum(each.numel for each in tensors) > _MOST_NUMEL * threads
    return many or len(tensors) > _MOST_TENSORS * threads


def _start(
    name: str, encoded: Encoded, known: Streams, tasks: Executor, encode: EncodeCodes
) -> Future[Stored]:
    made = known.find(name, encoded)
    if made is None:
        # Copied on the caller's own CUDA stream: another thread's would not wait for it.
        return tasks.submit(_stored, name, encoded.to("cpu"), encode)
    done: Future[Stored] = Future()
    done.set_result(made)
    return done


def _first(waiting: deque[tuple[str, Encoded, Future[Stored]]], streams: Streams | None) -> Stored:
    name, encoded, future = waiting.popleft()
    made = future.result()
    if streams is not None:
        streams.keep(name, encoded, made)
    return made


def _stored(name: str, encoded: Encoded, encode: EncodeCodes) -> Stored:
    try:
        return stored(name, encoded, encode)
    except FormatError as error:
        error.add_note(f"while writing tensor {name!r}")
        raise
