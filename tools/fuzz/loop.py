"""The loop that all fuzzers share: numbered cases, each within its time and memory, and what they came to."""

from __future__ import annotations

import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from factorpack.engine import Local, Task
from factorpack.engine.task import peak_bytes

SPARE_BYTES, SHARE = 64 << 20, 4
"""A case may take this much memory, and this many times its size: that of its file and what the file declares."""
WALL_BYTES = 4 << 30
"""An unchecked number breaks its case and not the machine."""
VIOLATION = "violation"
PIECE = 2_000
"""Cases of a long run that are judged in one go, by one process."""

Result = tuple[str, int]
"""What a case came to, and its size in bytes."""
Judge = Callable[[random.Random], Result]
"""Makes a case of a generator's numbers and tries it. Whatever must not happen is raised."""
Run = Callable[[str, Callable[[], Result]], None]


@dataclass(frozen=True, slots=True)
class Target:
    """Something to fuzz."""

    prepare: Callable[[Path], Judge] | None = None
    """Makes what the cases need, in a folder of its own."""
    drive: Callable[[int, int, Run], None] | None = None
    """Makes the cases of a seed, where numbers alone do not: takes their number, the seed and what runs one."""
    seconds: float = 2.0
    """Processor time that a case may take. The clock on the wall ends it after ten times as long."""
    is_measured: bool = True
    """Whether memory is limited to the size of the case, and warnings are errors."""


@dataclass(slots=True)
class Outcome:
    """What became of the cases, and everything that must not happen."""

    cases: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: str = ""
    most_bytes_over: int | None = None
    """The largest growth of the process in a case, beyond SPARE_BYTES and SHARE times the size of the case."""

    def run(self, target: Target, name: str, work: Callable[[], Result]) -> None:
        """Judges one case. `name` is what repeats it."""
        self.cases += 1
        _reset_peak()
        before, began = peak_bytes(), time.process_time()
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 * target.seconds)
            result, size = work()
        except Exception as error:  # whatever it is, it is what this program looks for
            result, size = VIOLATION, 0
            self.violations.append(f"{name}: {type(error).__name__}: {error} at {_place(error)}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        took, over = time.process_time() - began, peak_bytes() - before - SPARE_BYTES - SHARE * size
        if took > self.slowest_s:
            self.slowest_s, self.slowest = took, name[:80]
        if target.is_measured:
            self.most_bytes_over = over if self.most_bytes_over is None else max(self.most_bytes_over, over)
        if took > target.seconds or (target.is_measured and over > 0):
            result = VIOLATION
            self.violations.append(f"{name}: took {took:.1f} s, and {over} bytes more than its size allows")
        self.counts[result] += 1

    def add(self, other: Outcome) -> None:
        """Takes in what became of other cases; seconds are the caller's to count."""
        self.cases += other.cases
        self.counts += other.counts
        self.violations += other.violations
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest
        known = [over for over in (self.most_bytes_over, other.most_bytes_over) if over is not None]
        self.most_bytes_over = max(known, default=None)


def fuzz_in_pieces(
    target: Target, cases: int, seed: int, start: int = 0, workers: int = 1
) -> Iterator[Outcome]:
    """Judges `cases` cases in `workers` processes; after every piece, what became of all cases so far."""
    total, began, end = Outcome(), time.perf_counter(), start + cases
    size = PIECE if target.drive is None else max(cases, 1)  # what has no numbered cases cannot be cut
    tasks = [
        Task(f"cases from {first}", fuzz, (target, min(size, end - first), seed, first))
        for first in range(start, end, size)
    ]
    here = (fuzz(*task.arguments) for task in tasks)
    elsewhere = (done.value for done in Local(workers, retries=0).run(tasks))
    for outcome in here if workers == 1 else elsewhere:
        total.add(outcome)
        total.seconds = time.perf_counter() - began
        yield total


def fuzz(target: Target, cases: int, seed: int, start: int = 0) -> Outcome:
    """Judges `cases` cases; case i of a seed is always the same one."""
    outcome, in_memory = Outcome(), Path("/dev/shm")
    place = in_memory if in_memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder, _walls(target):
        run = partial(outcome.run, target)
        judge = target.prepare(Path(folder)) if target.prepare is not None else None
        began = time.perf_counter()
        if target.drive is not None:
            target.drive(cases, seed, run)
        elif judge is not None:
            for index in range(start, start + cases):
                run(f"case {index}", partial(judge, random.Random(f"{seed}:{index}")))
        outcome.seconds = time.perf_counter() - began
    return outcome


@contextmanager
def _walls(target: Target) -> Iterator[None]:
    """A limit on memory, an alarm clock, one thread, and warnings that count as errors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    threads = torch.get_num_threads()
    previous = signal.signal(signal.SIGALRM, _too_long)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + WALL_BYTES, hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if target.is_measured else "ignore")
            yield
    finally:
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        torch.set_num_threads(threads)


def _too_long(*_: object) -> None:
    raise TimeoutError("the case does not end")


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _reset_peak() -> None:
    """From here on the peak counts anew, on Linux; elsewhere there is none to read."""
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        pass
