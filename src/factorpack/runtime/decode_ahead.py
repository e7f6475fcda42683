"""Streams decoded by threads before their layers run, in the order in which layers ran the last time.

pcodec, which reads nearly all codes of large weights, lets other threads run meanwhile; constriction, which reads
the rest, does not. So several weights are decoded at the same time, and some while another layer computes.
Nothing is kept in a model: a copy of it, or one that was pickled, needs no threads of its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from factorpack.record import Encoded

FLOAT_BYTES = 4
"""Codes of one byte that take as much memory as a weight."""


class Streamed(Protocol):
    """A weight that can be decoded."""

    def elements(self) -> int: ...

    def decoder(self) -> Callable[[], Encoded]:
        """What decodes it, without a reference to the weight itself."""


class DecodeAhead:
    """What is decoded before it is requested. Its codes take no more memory than the largest of these weights."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops everything; in a forked process its threads do not exist."""
        self._lock = threading.Lock()
        self._last = threading.local()
        """The weight that each thread used last."""
        self._after: weakref.WeakKeyDictionary[Streamed, weakref.ref[Streamed]] = weakref.WeakKeyDictionary()
        self._waiting: weakref.WeakKeyDictionary[Streamed, Future[Encoded]] = weakref.WeakKeyDictionary()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def take(self, weight: Streamed) -> Encoded:
        """A weight's codes. With one thread, nothing is decoded ahead."""
        threads = torch.get_num_threads()
        if threads < 2:
            return weight.decoder()()
        with self._lock:
            before = getattr(self._last, "weight", lambda: None)()
            if before is not None and before is not weight:
                self._after[before] = weakref.ref(weight)
            self._last.weight = weakref.ref(weight)
            found = self._waiting.pop(weight, None)
            self._start_next(weight, threads)
        return weight.decoder()() if found is None else found.result()

    def _start_next(self, weight: Streamed, threads: int) -> None:
        """Starts what is likely to be used next, and drops what was likely before and is not now."""
        chain = self._chain(weight, threads)
        for other in [each for each in self._waiting if each not in chain]:
            self._waiting.pop(other).cancel()
        for each in chain:
            if each not in self._waiting:
                self._waiting[each] = self._threads(threads).submit(each.decoder())

    def _chain(self, weight: Streamed, most: int) -> list[Streamed]:
        """The weights that followed this one."""
        chain: list[Streamed] = []
        total, largest, known = 0, weight.elements(), self._after.get(weight)
        while known is not None and len(chain) < most:
            following = known()
            if following is None or following is weight or following in chain:
                break
            total, largest = total + following.elements(), max(largest, following.elements())
            if total > FLOAT_BYTES * largest:
                break
            chain.append(following)
            known = self._after.get(following)
        return chain

    def _threads(self, count: int) -> ThreadPoolExecutor:
        if self._pool is None or self._pool[0] != count:
            if self._pool is not None:
                self._pool[1].shutdown(wait=False)
            self._pool = count, ThreadPoolExecutor(count, "factorpack-decode")
        return self._pool[1]


AHEAD = DecodeAhead()
"""One for the process, so that models which run in turns share its threads."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=AHEAD.forget)
