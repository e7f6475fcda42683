"""Processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from factorpack.engine.memory import free_bytes
from factorpack.engine.task import Engine, Outcome, Task, perform, require_success, worker_died_error
from factorpack.errors import PlanError

POLL_SECONDS = 1.0
"""How often an idle worker checks that its parent process is still alive."""


@dataclass(frozen=True, slots=True)
class Local:
    """`workers` single-threaded processes; 0 means one per core.

    The tasks that need the most memory start first, so that no large one runs alone at the end. A task waits
    while running tasks declare more than `memory_share` of the memory that was free at the start; one task
    always runs. Tasks that need a GPU run on one each: as many at a time as there are GPUs.

    Workers start as new interpreters, so a script must start its work under `if __name__ == "__main__":`.
    `start="fork"` is faster to start, and only for processes without threads.
    """

    workers: int = 0
    retries: int = 2
    """How many times a task is rerun after its worker died."""
    memory_share: float = 0.8
    start: Literal["spawn", "fork"] = "spawn"

    def __post_init__(self) -> None:
        if self.workers < 0 or self.retries < 0 or not 0 < self.memory_share <= 1:
            raise PlanError(
                f"workers {self.workers}, retries {self.retries}, memory_share {self.memory_share}: "
                "expected at least 0, at least 0, and above 0 up to 1"
            )

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        with self.keep() as pool:
            yield from pool.run(tasks)

    @contextmanager
    def keep(self) -> Iterator[Engine]:
        """An engine whose workers stay from one run to the next, until the block ends."""
        pool = _WorkerPool(self)
        try:
            yield pool
        finally:
            pool.stop()


@dataclass(eq=False, slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    place: int
    """The lowest that no other worker has."""
    task: Task | None = None


class _WorkerPool:
    """Workers, and the tasks of one run at a time waiting for them."""

    def __init__(self, settings: Local) -> None:
        self._context: Any = multiprocessing.get_context(settings.start)
        self._settings = settings
        self._workers: list[_Worker] = []

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        self._waiting = sorted(tasks, key=lambda task: -task.memory_bytes)
        self._max_workers = self._most_workers(tasks)
        free = free_bytes()
        self._memory_limit = None if free is None else self._settings.memory_share * free
        self._deaths: Counter[int] = Counter()
        """By the task's identity: names need not be unique."""
        try:
            yield from self._outcomes()
        finally:
            if self._busy():  # the run was left early: no later one may get its outcomes
                self.stop()

    def _most_workers(self, tasks: Sequence[Task]) -> int:
        most = min(self._settings.workers or os.cpu_count() or 1, len(tasks))
        if any(task.on_gpu for task in tasks):
            return max(min(most, torch.cuda.device_count()), 1)
        return most

    def _outcomes(self) -> Iterator[Outcome]:
        while self._waiting or self._busy():
            while (task := self._next_task()) is not None:
                self._send(task)
            ready = wait([worker.connection for worker in self._busy()])
            for worker in [worker for worker in self._busy() if worker.connection in ready]:
                outcome = self._receive(worker)
                if outcome is not None:
                    yield require_success(outcome)

    def stop(self) -> None:
        """Kills all workers, busy ones too: their files are written atomically."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.task is not None]

    def _next_task(self) -> Task | None:
        """The largest waiting task that fits in memory beside the running ones, if a worker is free."""
        running = [worker.task for worker in self._workers if worker.task is not None]
        if len(running) >= self._max_workers:
            return None
        used = sum(task.memory_bytes for task in running)
        for index, task in enumerate(self._waiting):
            if not running or self._memory_limit is None or used + task.memory_bytes <= self._memory_limit:
                return self._waiting.pop(index)
        return None

    def _send(self, task: Task) -> None:
        worker = next((each for each in self._workers if each.task is None), None) or self._start_worker()
        worker.task = task
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: _receive sees the end of its pipe
            worker.connection.send(task)

    def _start_worker(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        place = min(set(range(len(self._workers) + 1)) - {worker.place for worker in self._workers})
        process = self._context.Process(target=_serve, args=(theirs, os.getpid(), place), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours, place))
        return self._workers[-1]

    def _receive(self, worker: _Worker) -> Outcome | None:
        """The outcome a worker sent; None if it died and its task was queued again."""
        task = worker.task
        assert task is not None
        try:
            outcome: Outcome = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            self._workers.remove(worker)
            worker.connection.close()
            self._deaths[id(task)] += 1
            if self._deaths[id(task)] > self._settings.retries:
                reason = _exit_reason(worker.process.exitcode or 0)
                raise worker_died_error(task, self._deaths[id(task)], reason) from None
            self._waiting.insert(0, task)
            return None
        worker.task = None
        return outcome


def _serve(connection: Connection, driver: int, place: int) -> None:
    """Runs tasks and sends their outcomes until the driver is gone. Workers of unlike places have GPUs of their own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted driver stops its workers itself
    torch.set_num_threads(1)
    while True:
        while not connection.poll(POLL_SECONDS):
            if os.getppid() != driver:  # the pipe may outlive it: workers forked later hold it open
                return
        try:
            task: Task = connection.recv()
            if task.on_gpu:
                torch.cuda.set_device(place % torch.cuda.device_count())
            connection.send(perform(task))
        except (EOFError, ConnectionError):  # the driver is gone
            return


def _exit_reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    if -exit_code == signal.SIGKILL:
        return "killed (SIGKILL), as the system does when memory runs out"
    return f"by {signal.Signals(-exit_code).name}"
