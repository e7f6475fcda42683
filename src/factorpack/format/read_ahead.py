"""A file's tensors in order, with large ones decoded by threads in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from factorpack.format.container import Reader
from factorpack.record import Encoded

LARGE_BYTES = 1 << 22
"""Streams below this are not worth a thread: waiting for the interpreter lock costs what a second core gains."""


def read_ahead(reader: Reader, threads: int) -> Iterator[tuple[str, Encoded]]:
    """`reader.items()`; at most `threads` large tensors are held before they are requested."""
    if threads < 2:
        yield from reader.items()
        return
    large = iter([name for name, row in reader.rows.items() if row.stored_bytes >= LARGE_BYTES])
    waiting: deque[Future[Encoded]] = deque()
    with ThreadPoolExecutor(threads) as pool:

        def start_next() -> None:
            for name in large:
                waiting.append(pool.submit(reader.__getitem__, name))
                return

        for _ in range(threads):
            start_next()
        for name, row in reader.rows.items():
            if row.stored_bytes < LARGE_BYTES:
                yield name, reader[name]
            else:
                encoded = waiting.popleft().result()
                start_next()
                yield name, encoded
