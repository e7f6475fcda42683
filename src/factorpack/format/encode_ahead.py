"""Tensors' rows and streams in order, encoded in advance: small models by threads, large ones by processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from queue import PriorityQueue

from factorpack.errors import FormatError
from factorpack.format.container import stored
from factorpack.format.encode_workers import EncodeCodes, are_running, encode_codes, encode_elsewhere
from factorpack.format.schema import TensorRow
from factorpack.record import Encoded

_MOST_TENSORS, _MOST_NUMEL = 32, 1 << 23
"""Tensors that wait, and their elements, per thread: encoding takes about five bytes per element."""

_LEAST_SENT, _MANY = 1 << 16, 1 << 22
"""Elements of a tensor that is worth sending to a worker, and of all tensors so far that are worth starting one."""

_FEW = 1 << 12
"""Values that are stored as they are, or nearly so, in less time than a thread takes to begin."""

Stored = tuple[TensorRow, bytes]


class Streams:
    """Streams that have been made once, for a caller who measures a file before writing it.

    The last one of each name is held, with the very `Encoded` it was made from: no other one matches it.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[Encoded, Future[Stored]]] = {}

    def find(self, name: str, encoded: Encoded) -> Stored | None:
        """The stream, once it is made if it has begun."""
        held = self._held.get(name)
        return held[1].result() if held is not None and held[0] is encoded else None

    def keep(self, name: str, encoded: Encoded, made: Stored) -> None:
        self._held[name] = encoded, _done(made)

    def begin(self, name: str, encoded: Encoded, pool: LargestFirst, seen: int) -> None:
        """Starts to make a stream that is not here, in a pool; `seen` are the elements of all tensors of the file."""
        held = self._held.get(name)
        if held is None or held[0] is not encoded:
            self._held[name] = encoded, _start(name, encoded, pool, seen)


class LargestFirst(ThreadPoolExecutor):
    """Threads that encode the largest waiting tensor next, so that no large one is left alone at the end."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._waiting: PriorityQueue[tuple[int, int, Callable[[], None]]] = PriorityQueue()
        self._count = count()

    def start(self, name: str, encoded: Encoded, encode: EncodeCodes) -> Future[Stored]:
        """Encodes a tensor when its turn comes."""
        future: Future[Stored] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(_stored(name, encoded, encode))
            except BaseException as error:
                future.set_exception(error)

        self._waiting.put((-encoded.numel, next(self._count), work))
        self.submit(lambda: self._waiting.get()[2]())
        return future


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
    with LargestFirst(threads) as tasks:
        waiting: deque[tuple[str, Encoded, Future[Stored]]] = deque()
        seen = 0
        try:
            for name, encoded in tensors:
                while waiting and _is_enough([*(each for _, each, _ in waiting), encoded], threads):
                    yield _first(waiting, streams)
                seen += encoded.numel
                held = known.find(name, encoded)
                future = _start(name, encoded, tasks, seen) if held is None else _done(held)
                waiting.append((name, encoded, future))
            while waiting:
                yield _first(waiting, streams)
        finally:
            for _, _, future in waiting:
                future.cancel()


def _is_enough(tensors: list[Encoded], threads: int) -> bool:
    many = sum(each.numel for each in tensors) > _MOST_NUMEL * threads
    return many or len(tensors) > _MOST_TENSORS * threads


def _start(name: str, encoded: Encoded, tasks: LargestFirst, seen: int) -> Future[Stored]:
    """Begins to encode a tensor: a large one in a worker, where `seen` elements of tensors are worth starting some."""
    if not encoded.bits and sum(part.numel() for part in encoded.parts.values()) <= _FEW:
        return _encode_here(name, encoded.to("cpu"))
    elsewhere = encoded.numel >= _LEAST_SENT and (are_running() or seen >= _MANY)
    # Copied on the caller's own CUDA stream: another thread's would not wait for it.
    return tasks.start(name, encoded.to("cpu"), encode_elsewhere if elsewhere else encode_codes)


def _encode_here(name: str, encoded: Encoded) -> Future[Stored]:
    """Encodes a tensor at once; an error waits until the tensor's turn comes."""
    try:
        return _done(_stored(name, encoded, encode_codes))
    except Exception as error:
        failed: Future[Stored] = Future()
        failed.set_exception(error)
        return failed


def _done(made: Stored) -> Future[Stored]:
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
