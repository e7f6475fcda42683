"""Codes -> bytes in other processes: fitting a model to codes holds the interpreter's lock for most of its time.

A worker imports numpy and the coders, never torch, so it starts in a tenth of a second. It reads matrices
from its standard input and writes streams to its standard output until its input ends.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from factorpack.format import entropy, trellis_stream
from factorpack.format.symbols import Codes

EncodeCodes = Callable[[Codes, int, int], bytes]
"""From a matrix of codes, its `split` and the states of its trellis to its stream."""
_PROGRAM = (
    "import sys; threads, *sys.path[:] = sys.argv[1:]; from factorpack.format import encode_workers as it; "
    "it.serve(int(threads))"
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Worker = subprocess.Popen[bytes]
_idle: deque[Worker] = deque()
"""Workers that wait for work, the last used one at the right end."""


def encode_codes(codes: Codes, split: int, states: int, pool: Executor | None = None) -> bytes:
    """Entropy codes a matrix in this process; `states` is 0 for codes that are no path through a trellis."""
    if states:
        return trellis_stream.encode(codes, states, split, pool)
    return entropy.encode(codes, split, pool)


def encode_elsewhere(codes: Codes, split: int, states: int) -> bytes:
    """As `encode_codes`, with the same bytes, in a worker; here where workers cannot start or one has died."""
    worker = _take()
    if worker is None:
        return encode_codes(codes, split, states)
    try:
        made = _ask(worker, (codes, split, states))
    except (OSError, EOFError, pickle.UnpicklingError):
        _stop(worker)
        return encode_codes(codes, split, states)
    except BaseException:
        _stop(worker)  # it may be in the middle of a stream
        raise
    _idle.append(worker)
    if isinstance(made, Exception):
        raise made
    return made


def are_running() -> bool:
    return bool(_idle)


def _take() -> Worker | None:
    """A worker that waits, or a new one: there are as many as threads have asked at the same time."""
    try:
        return _idle.pop()
    except IndexError:
        return _start()


def _start() -> Worker | None:
    if not Path(sys.executable or "").name.lower().startswith("python"):
        return None  # an application with an interpreter inside: it cannot be told to run a program
    import torch  # which a worker itself does without

    try:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(torch.get_num_threads()), *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD,
        )
    except OSError:
        return None


def _ask(worker: Worker, work: tuple[Codes, int, int]) -> bytes | Exception:
    assert worker.stdin is not None
    assert worker.stdout is not None
    _send(worker.stdin, work)
    made: bytes | Exception = pickle.load(worker.stdout)  # from a process that this one started
    return made


def _send(file: IO[bytes], value: object) -> None:
    pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
    file.flush()


def _stop(worker: Worker) -> None:
    worker.kill()
    with suppress(BrokenPipeError), worker:  # closes the pipes, even where it died before reading, and waits
        pass


@atexit.register
def stop_idle() -> None:
    """Ends the workers that wait."""
    while _idle:
        _stop(_idle.pop())


def _forget() -> None:
    """A forked child shares its parent's pipes, and must not write into them."""
    for worker in _idle:
        worker.returncode = 0  # not this process's to wait for
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def serve(threads: int) -> None:
    """The worker's side: one matrix after the other, until the caller is gone, each by as many threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends its workers
    copied = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else can write between the results
    with (
        suppress(OSError, EOFError, pickle.UnpicklingError),
        os.fdopen(copied, "wb") as results,
        ThreadPoolExecutor(threads) as pool,
    ):
        while True:
            codes, split, states = pickle.load(sys.stdin.buffer)
            try:
                made: object = encode_codes(codes, split, states, pool)
            except Exception as error:
                made = error
            _send(results, made)
