"""Progress of a job: one bar on a terminal, one line in a notebook, or calls of the caller's own function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

from factorpack.printable import printable

ENOUGH_TO_TELL = 0.05
"""The share of a job from which on the time that is left is estimated."""
NOTEBOOK_SECONDS = 0.25
"""A notebook's line changes no more often than this."""


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """What a function given as `progress` is called with, in the thread that does the work.

    An exception that it raises ends the work, and reaches the caller.
    """

    phase: str
    """What is being done, for example "planning"; "done" in the last call."""
    item: str
    """The tensor, block or point that was finished or begun; empty where there is none."""
    phase_fraction: float
    """Of this phase, from 0 to 1."""
    fraction: float
    """Of the whole job, from 0 to 1. It falls where a phase turns out to be needed again."""
    seconds: float
    """Since the job began."""
    seconds_left: float | None
    """An estimate; None at the beginning, where there is too little to tell from."""


ProgressOption = bool | Callable[[ProgressUpdate], None]
"""Whether a bar is shown, where somebody can see it, or what is called with each update."""


class Job:
    """Phases that share one bar. `phases` are their names, in order, and the time that each usually takes.

    The unit of that time does not matter: the pace is measured.
    """

    def __init__(self, phases: Iterable[tuple[str, float]], shown: ProgressOption) -> None:
        self._to_come = list(phases)
        self._known: dict[str, float] = {}
        """What one unit of work of each phase usually takes, once it has begun."""
        self._display = _display(shown, self)
        self._started = time.monotonic()
        self._phase, self._item = "starting", ""
        self._share = self._spent = 0.0
        self._done, self._total = 0, 1
        self._phase_started = self._started

    def __enter__(self) -> Job:
        if self._display is not None:
            self._display.start()
        return self

    def begin(self, phase: str, total: int) -> None:
        """Starts a phase. Those that usually come before it and did not are left out of the whole."""
        self._phase, self._item = phase, ""
        self._done, self._total = 0, max(total, 1)
        names = [name for name, _ in self._to_come]
        if phase in names:
            place = names.index(phase)
            self._share = self._to_come[place][1]
            self._known[phase] = self._share / self._total
            del self._to_come[: place + 1]
        else:  # it comes again, perhaps for a part of the work, and is added to the whole
            self._share = self._known.get(phase, 0.0) * self._total
        self._phase_started = time.monotonic()
        self._say()

    def advance(self, item: str, count: int) -> None:
        self._done = min(self._done + count, self._total)
        self._item = item
        self._say()

    def end(self) -> None:
        """Ends a phase, with all of its share spent."""
        self._spent += self._share
        self._share, self._done = 0.0, self._total

    def update(self) -> ProgressUpdate:
        """Where the job stands now."""
        within = self._done / self._total
        spent = self._spent + self._share * within
        whole = self._spent + self._share + self._left()
        now = time.monotonic()
        fraction = spent / whole if whole else 0.0
        left = self._seconds_left(spent, within, now) if fraction >= ENOUGH_TO_TELL else None
        return ProgressUpdate(self._phase, self._item, within, fraction, now - self._started, left)

    def _seconds_left(self, spent: float, within: float, now: float) -> float:
        """What is left at the pace so far; for the rest of a phase, its own pace counts more as it goes on."""
        pace = (now - self._started) / spent
        own = (now - self._phase_started) / (self._share * within) if self._share * within else pace
        mixed = within * own + (1 - within) * pace
        return mixed * self._share * (1 - within) + pace * self._left()

    def _left(self) -> float:
        return sum(share for _, share in self._to_come)

    def _say(self) -> None:
        if self._display is not None:
            self._display.show(self.update())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is None:
            return
        seconds = time.monotonic() - self._started
        try:
            if error is None:
                self._display.show(ProgressUpdate("done", "", 1.0, 1.0, seconds, 0.0))
        finally:
            self._display.stop()


Showing = ProgressOption | Job
"""How progress is shown, or the job whose phase this is."""


class Progress:
    """A phase: of a job, or a job of its own. It counts weights, or other units of work."""

    def __init__(self, verb: str, total: int, shown: Showing = True) -> None:
        self._verb, self._total = verb, total
        self._owns = not isinstance(shown, Job)
        self._job = shown if isinstance(shown, Job) else Job([(verb, 1.0)], shown)

    def __enter__(self) -> Progress:
        if self._owns:
            self._job.__enter__()
        self._job.begin(self._verb, self._total)
        return self

    def show(self, item: str) -> None:
        self._job.advance(item, 0)

    def advance(self, item: str, count: int) -> None:
        self._job.advance(item, count)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.end()
        if self._owns:
            self._job.__exit__(kind, error, trace)


class _Display(Protocol):
    def start(self) -> None: ...

    def show(self, update: ProgressUpdate) -> None: ...

    def stop(self) -> None: ...


def _display(shown: ProgressOption, job: Job) -> _Display | None:
    """A caller's function, else a terminal's bar or a notebook's line; None where there is nobody to see it."""
    if not isinstance(shown, bool):
        return _Caller(shown)
    if not shown:
        return None
    if sys.stderr is not None and sys.stderr.isatty():
        return _Bar(job)
    return _NotebookLine() if _in_notebook() else None


@dataclass(frozen=True, slots=True)
class _Caller:
    show: Callable[[ProgressUpdate], None]

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


class _Bar:
    """On standard error, gone when the job ends."""

    def __init__(self, job: Job) -> None:
        self._rich = _make_bar(job)
        self._task = self._rich.add_task("", total=1.0, item="")

    def start(self) -> None:
        self._rich.start()

    def show(self, update: ProgressUpdate) -> None:
        item = printable(update.item)
        self._rich.update(self._task, completed=update.fraction, description=update.phase, item=item)

    def stop(self) -> None:
        self._rich.stop()


def _make_bar(job: Job) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        def render(self, task: Task) -> Text:  # noqa: ARG002
            return Text(time_left(job.update().seconds_left), "progress.remaining")

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeLeft(),
        TextColumn("{task.fields[item]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )


class _NotebookLine:
    """One line of text in a notebook's cell, which needs no widgets."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0

    def start(self) -> None:
        from IPython.display import display

        self._handle = display(_as_text("starting"), raw=True, display_id=True)

    def show(self, update: ProgressUpdate) -> None:
        now = time.monotonic()
        if update.phase != "done" and now - self._shown < NOTEBOOK_SECONDS:
            return
        self._shown = now
        text = f"{update.phase} {update.fraction:4.0%}  {time_left(update.seconds_left)}  {update.item}"
        if update.phase == "done":
            text = f"done in {say_seconds(update.seconds)}"
        if self._handle is not None:
            self._handle.update(_as_text(printable(text)), raw=True)

    def stop(self) -> None:
        pass


def _as_text(text: str) -> dict[str, str]:
    return {"text/plain": text}


def _in_notebook() -> bool:
    """Whether the process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = type(ipython.get_ipython()) if ipython is not None else object
    return any(base.__name__ == "ZMQInteractiveShell" for base in shell.__mro__)


def time_left(seconds: float | None) -> str:
    return "" if seconds is None else f"{say_seconds(seconds)} left"


def say_seconds(seconds: float) -> str:
    """Seconds as a person would say them.

    >>> say_seconds(8.4), say_seconds(150), say_seconds(7300)
    ('8 s', '2 min 30 s', '2 h 1 min')
    """
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
