"""A progress bar on standard error, shown only on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

from factorpack.printable import printable


class Progress:
    """Counts weights, or other units. Silent unless `shown` is set and standard error is a terminal."""

    def __init__(self, verb: str, total: int, shown: bool = True, unit: str = "M weights") -> None:
        self._verb = verb
        self._total = total
        self._rich: RichProgress | None = None
        self._task: TaskID | None = None
        if shown and sys.stderr.isatty():
            self._rich = _bar(unit, 1e6 if unit.startswith("M ") else 1.0)

    def __enter__(self) -> Progress:
        if self._rich is not None:
            self._rich.start()
            self._task = self._rich.add_task(self._verb, total=self._total, tensor="")
        return self

    def show(self, tensor: str) -> None:
        if self._rich is not None and self._task is not None:
            self._rich.update(self._task, tensor=printable(tensor))

    def advance(self, tensor: str, count: int) -> None:
        if self._rich is not None and self._task is not None:
            self._rich.update(self._task, advance=count, tensor=printable(tensor))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()


def _bar(unit: str, scale: float) -> RichProgress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{(task.speed or 0.0) / scale:5.1f} {unit}/s")

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        Rate(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[tensor]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
