"""What an engine runs, and what comes of it."""

from __future__ import annotations

import os
import pickle
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from factorpack.errors import EngineError, FactorpackError
from factorpack.progress import Progress


@dataclass(frozen=True, slots=True)
class Task:
    """A call of an importable function on small things: paths, names and settings, never weights."""

    name: str
    """The tensor or point it is about: errors and the progress bar say it."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    memory_bytes: int = 0
    """What it will need at most, about: tasks that do not fit beside each other wait."""
    size: int = 1
    """How far it brings the whole, in the progress bar's unit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task returned, or why it did not."""

    task: Task
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Time its process was given, which on a busy machine is less."""
    worker: str = ""
    """The machine and process it ran in."""
    peak_bytes: int = 0
    """The most memory that process has had so far; 0 where the system does not tell."""


class Engine(Protocol):
    """Runs tasks somewhere else and yields what they return, in the order they end.

    A task whose worker died is run again, a few times. A task that raises is not: its error is raised
    here, with the task's name, and what has been done by then stays done.
    """

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]: ...


def outcomes(
    engine: Engine, tasks: Sequence[Task], verb: str, progress: bool, unit: str = "M weights"
) -> Iterator[Outcome]:
    """Runs tasks behind a progress bar."""
    with Progress(verb, sum(task.size for task in tasks), progress, unit) as bar:
        for outcome in engine.run(tasks):
            bar.advance(outcome.task.name, outcome.task.size)
            yield outcome


def perform(task: Task) -> Outcome:
    """Runs a task in this process; an error becomes a part of the outcome."""
    started, given = time.perf_counter(), time.process_time()
    value, problem = None, None
    try:
        value = task.function(*task.arguments)
    except Exception as error:
        problem = _portable(error)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - given
    worker = f"{platform.node()}:{os.getpid()}"
    return Outcome(task, value, problem, seconds, cpu_seconds, worker, peak_bytes())


def _portable(error: Exception) -> Exception:
    """An error as it can be sent: with the trace of one nobody foresaw, in plain words if it must be."""
    trace = "" if isinstance(error, FactorpackError | OSError) else traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if trace:
        error.add_note(trace)
    return error


def checked(outcome: Outcome) -> Outcome:
    """The outcome of a task that ended well; the error of one that did not, with its name."""
    if outcome.error is None:
        return outcome
    note = f"in a worker on {outcome.task.name!r}"
    if note not in getattr(outcome.error, "__notes__", ()):
        outcome.error.add_note(note)
    raise outcome.error


def given_up(task: Task, tries: int, reason: str) -> EngineError:
    """The error of a task that no worker survived."""
    return EngineError(
        f"{task.name!r}: its worker ended {tries} times, the last time {reason}. "
        f"It was stated to need {task.memory_bytes / 1e6:.0f} MB: if memory ran out, use fewer workers. "
        "What the others have done is kept; the same command goes on from there"
    )


def peak_bytes() -> int:
    """The most memory this process has had resident. getrusage would also count its parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
