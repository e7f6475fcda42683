"""Tasks, their outcomes, and the engine protocol."""

from __future__ import annotations

import os
import pickle
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from factorpack.errors import EngineError, FactorpackError
from factorpack.progress import Progress, Showing


@dataclass(frozen=True, slots=True)
class Task:
    """A call of an importable function with small arguments: paths, names and settings, never weights."""

    name: str
    """The tensor or point it works on, shown in errors and the progress bar."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    memory_bytes: int = 0
    """Estimated peak memory: tasks that do not fit in memory together wait."""
    size: int = 1
    """Its share of the work, in the progress bar's unit."""
    on_gpu: bool = False
    """Whether it needs a GPU; it finds one of its own as torch's current one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task returned or raised."""

    task: Task
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of its process, less than `seconds` on a busy machine."""
    worker: str = ""
    """The machine and process it ran in."""
    peak_bytes: int = 0
    """Peak memory of that process so far; 0 where the system does not report it."""


class Engine(Protocol):
    """Runs tasks in other processes and yields their outcomes in the order they finish.

    A task whose worker died is retried a few times. A task that raises is not: its error is raised here,
    with the task's name, and the results so far are kept.
    """

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]: ...


@runtime_checkable
class Keeping(Protocol):
    """An engine that can keep its workers from one run to the next."""

    def keep(self) -> AbstractContextManager[Engine]: ...


def keep_workers(engine: Engine) -> AbstractContextManager[Engine]:
    """The engine, with workers that stay until the block ends where it can keep them."""
    return engine.keep() if isinstance(engine, Keeping) else nullcontext(engine)


def run_tasks(engine: Engine, tasks: Sequence[Task], verb: str, progress: Showing) -> Iterator[Outcome]:
    """Runs tasks with a progress bar."""
    with Progress(verb, sum(task.size for task in tasks), progress) as bar:
        for outcome in engine.run(tasks):
            bar.advance(outcome.task.name, outcome.task.size)
            yield outcome


def perform(task: Task) -> Outcome:
    """Runs a task in this process; an error is stored in the outcome."""
    started, cpu_started = time.perf_counter(), time.process_time()
    value, problem = None, None
    try:
        value = task.function(*task.arguments)
    except Exception as error:
        problem = _picklable(error)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    worker = f"{platform.node()}:{os.getpid()}"
    return Outcome(task, value, problem, seconds, cpu_seconds, worker, peak_bytes())


def _picklable(error: Exception) -> Exception:
    """The error in a form that can be pickled; an unexpected one carries its traceback as a note."""
    trace = "" if isinstance(error, FactorpackError | OSError) else traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if trace:
        error.add_note(trace)
    return error


def require_success(outcome: Outcome) -> Outcome:
    """The outcome of a task that succeeded; raises the error of one that failed, with the task's name."""
    if outcome.error is None:
        return outcome
    note = f"in a worker on {outcome.task.name!r}"
    if note not in getattr(outcome.error, "__notes__", ()):
        outcome.error.add_note(note)
    raise outcome.error


def worker_died_error(task: Task, tries: int, reason: str) -> EngineError:
    """The error for a task whose workers kept dying."""
    return EngineError(
        f"{task.name!r}: its worker died {tries} times, the last time {reason}. "
        f"Its estimated memory is {task.memory_bytes / 1e6:.0f} MB: if memory ran out, use fewer workers. "
        "The results of the other tasks are kept; run the same command again to resume"
    )


def peak_bytes() -> int:
    """Peak resident memory of this process. getrusage would also count its parent's."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
