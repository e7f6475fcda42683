"""A file's tensors in order, the large ones decoded by threads before their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from factorpack.format.container import Reader
from factorpack.record import Encoded

LARGE_BYTES = 1 << 22
"""Of a stream: below this threads that wait for each other's Python lose what two cores gain."""


def read_ahead(reader: Reader, threads: int) -> Iterator[tuple[str, Encoded]]:
    """`reader.items()`, of which at most `threads` large ones are held that were not yet asked for."""
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
