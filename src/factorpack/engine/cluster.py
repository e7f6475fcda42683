"""A Ray cluster: the one there is, or one on this machine for the time of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from factorpack.engine.task import Outcome, Task, checked, given_up, perform
from factorpack.errors import EngineError, PlanError

IN_FLIGHT_A_WORKER = 2
"""Tasks handed to Ray for each of its workers: enough that none waits for the driver."""


@dataclass(frozen=True, slots=True)
class Ray:
    """One Ray task a task, on a core and the memory it states; 0 workers are all cores of the cluster.

    Only paths, names and settings travel through Ray. Every machine must see the source and the output
    under the same paths, on storage they share, and have factorpack installed.
    """

    workers: int = 0
    retries: int = 2
    """How often Ray runs a task again after its worker or machine is gone."""

    def __post_init__(self) -> None:
        if self.workers < 0 or self.retries < 0:
            raise PlanError(f"workers {self.workers}, retries {self.retries}: expected at least 0")

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        ray = _ray()
        started = _connect(ray, self.workers)
        try:
            yield from self._outcomes(ray, tasks)
        finally:
            if started:
                ray.shutdown()

    def _outcomes(self, ray: Any, tasks: Sequence[Task]) -> Iterator[Outcome]:
        workers = self.workers or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        largest = max(
            (node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"]), default=0
        )
        call = ray.remote(_perform)
        waiting = sorted(tasks, key=lambda task: task.memory_bytes)  # taken from the end: the largest first
        running: dict[Any, Task] = {}
        # Ray holds back what does not fit beside the rest; with `workers` given it must not start more.
        most = self.workers or IN_FLIGHT_A_WORKER * workers
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    task = waiting.pop()
                    # A request that no machine can meet would wait for ever.
                    memory = min(task.memory_bytes, int(0.9 * largest))
                    options = call.options(
                        num_cpus=1, memory=memory, max_retries=self.retries, name=task.name
                    )
                    running[options.remote(task)] = task
                (done,), _ = ray.wait(list(running), num_returns=1)
                yield checked(self._heard(ray, done, running.pop(done)))
        finally:
            for reference in running:  # of a run that is left early, in a cluster that stays
                ray.cancel(reference, force=True)

    def _heard(self, ray: Any, reference: Any, task: Task) -> Outcome:
        try:
            outcome: Outcome = ray.get(reference)
        except ray.exceptions.RayError as error:
            lines = str(error).splitlines()
            raise given_up(
                task, self.retries + 1, f"as Ray says: {lines[0] if lines else error!r}"
            ) from error
        return outcome


def _perform(task: Task) -> Outcome:
    import torch

    torch.set_num_threads(1)
    return perform(task)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            "the engine 'ray' needs ray: pip install 'factorpack[ray]', on every machine of the cluster; "
            "'local' needs nothing"
        ) from error
    return ray


def _connect(ray: Any, workers: int) -> bool:
    """Joins the cluster there is; where there is none starts one here, and says so."""
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        ray.init(num_cpus=workers or None, include_dashboard=False, **quiet)
    return True
