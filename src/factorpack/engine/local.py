"""Processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from factorpack.engine.memory import free_bytes
from factorpack.engine.task import Outcome, Task, checked, given_up, perform
from factorpack.errors import PlanError

LOOK_EVERY_S = 1.0
"""How often a worker without work looks whether the process that feeds it is still there."""


@dataclass(frozen=True, slots=True)
class Local:
    """`workers` processes, each on one thread; 0 is one a core.

    The tasks that need most memory start first, so that none of them is left alone at the end. Tasks wait
    while those that run are stated to fill `memory_share` of what was free at the start; one always runs.

    Workers begin as new interpreters. A script of your own must therefore start its work under
    `if __name__ == "__main__":`. `start="fork"` begins at once, and is for processes without threads.
    """

    workers: int = 0
    retries: int = 2
    """How often a task is run again after its worker has died."""
    memory_share: float = 0.8
    start: Literal["spawn", "fork"] = "spawn"

    def __post_init__(self) -> None:
        if self.workers < 0 or self.retries < 0 or not 0 < self.memory_share <= 1:
            raise PlanError(
                f"workers {self.workers}, retries {self.retries}, memory_share {self.memory_share}: "
                "expected at least 0, at least 0, and above 0 up to 1"
            )

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        crew = _Crew(self, tasks)
        try:
            yield from crew.outcomes()
        finally:
            crew.dismiss()


@dataclass(eq=False, slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    task: Task | None = None


class _Crew:
    """The workers of one run, and the tasks that wait for them."""

    def __init__(self, settings: Local, tasks: Sequence[Task]) -> None:
        self._context: Any = multiprocessing.get_context(settings.start)
        self._retries = settings.retries
        self._waiting = sorted(tasks, key=lambda task: -task.memory_bytes)
        self._most = min(settings.workers or os.cpu_count() or 1, len(tasks))
        free = free_bytes()
        self._room = None if free is None else settings.memory_share * free
        self._workers: list[_Worker] = []
        self._deaths: Counter[int] = Counter()
        """By the task's identity: several may be about the same thing."""

    def outcomes(self) -> Iterator[Outcome]:
        while self._waiting or self._busy():
            while (task := self._next()) is not None:
                self._hand_out(task)
            ready = wait([worker.connection for worker in self._busy()])
            for worker in [worker for worker in self._busy() if worker.connection in ready]:
                outcome = self._heard(worker)
                if outcome is not None:
                    yield checked(outcome)

    def dismiss(self) -> None:
        """Ends all workers, those at work too: what they write appears whole or not at all."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.task is not None]

    def _next(self) -> Task | None:
        """The largest task that has a worker and room beside those that run."""
        running = [worker.task for worker in self._workers if worker.task is not None]
        if len(running) >= self._most:
            return None
        used = sum(task.memory_bytes for task in running)
        for place, task in enumerate(self._waiting):
            if not running or self._room is None or used + task.memory_bytes <= self._room:
                return self._waiting.pop(place)
        return None

    def _hand_out(self, task: Task) -> None:
        worker = next((each for each in self._workers if each.task is None), None) or self._hire()
        worker.task = task
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died: heard of as the end of its pipe
            worker.connection.send(task)

    def _hire(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]

    def _heard(self, worker: _Worker) -> Outcome | None:
        """What a worker says; None where it died and its task waits again."""
        task = worker.task
        assert task is not None
        try:
            outcome: Outcome = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            self._workers.remove(worker)
            worker.connection.close()
            self._deaths[id(task)] += 1
            if self._deaths[id(task)] > self._retries:
                reason = _reason(worker.process.exitcode or 0)
                raise given_up(task, self._deaths[id(task)], reason) from None
            self._waiting.insert(0, task)
            return None
        worker.task = None
        return outcome


def _serve(connection: Connection, driver: int) -> None:
    """A worker's life: a task, its outcome, the next, until the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted driver ends its workers itself
    torch.set_num_threads(1)
    while True:
        while not connection.poll(LOOK_EVERY_S):
            if os.getppid() != driver:  # a pipe need not end with it: workers forked later hold it open
                return
        try:
            connection.send(perform(connection.recv()))
        except (EOFError, ConnectionError):  # the driver has gone
            return


def _reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    if -exit_code == signal.SIGKILL:
        return "killed (SIGKILL), as the system does when memory runs out"
    return f"by {signal.Signals(-exit_code).name}"
