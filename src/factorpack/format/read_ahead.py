"""A file's tensors in order, with large ones decoded by threads in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from factorpack.format.container import Reader
from factorpack.record import Encoded

LARGE_BYTES = 1 << 17
"""Streams below this are not worth a thread: waiting for the interpreter lock costs what a second core gains."""


def read_ahead(
    reader: Reader, threads: int, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Encoded]]:
    """`reader.items()`, or those of `names`; at most `threads` large tensors are held before they are requested."""
    names = list(reader) if names is None else names
    if threads < 2:
        yield from ((name, reader[name]) for name in names)
        return
    large = {name for name in names if reader.rows[name].stored_bytes >= LARGE_BYTES}
    next_ones = iter([name for name in names if name in large])
    waiting: deque[Future[Encoded]] = deque()
    with ThreadPoolExecutor(threads) as pool:

        def start_next() -> None:
            for name in next_ones:
                waiting.append(pool.submit(reader.__getitem__, name))
                return

        for _ in range(threads):
            start_next()
        for name in names:
            if name not in large:
                yield name, reader[name]
            else:
                encoded = waiting.popleft().result()
                start_next()
                yield name, encoded
