"""A Ray cluster: a running one, or one started on this machine for the duration of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from factorpack.engine.task import Engine, Outcome, Task, perform, require_success, worker_died_error
from factorpack.errors import EngineError, PlanError

IN_FLIGHT_PER_WORKER = 2
"""Tasks submitted to Ray per worker: enough that no worker waits for the driver."""


@dataclass(frozen=True, slots=True)
class Ray:
    """One Ray task per task, on one core and its declared memory; 0 workers means every core of the cluster.

    A task that needs a GPU gets one from Ray.

    Only paths, names and settings travel through Ray. Every machine must see the source and the output
    under the same paths, on shared storage, and have factorpack installed.
    """

    workers: int = 0
    retries: int = 2
    """How many times Ray reruns a task after losing its worker or machine."""

    def __post_init__(self) -> None:
        if self.workers < 0 or self.retries < 0:
            raise PlanError(f"workers {self.workers}, retries {self.retries}: expected at least 0")

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        with self.keep():
            yield from self._outcomes(_import_ray(), tasks)

    @contextmanager
    def keep(self) -> Iterator[Engine]:
        """The engine, connected to its cluster until the block ends."""
        ray = _import_ray()
        started = _connect(ray, self.workers)
        try:
            yield self
        finally:
            if started:
                ray.shutdown()

    def _outcomes(self, ray: Any, tasks: Sequence[Task]) -> Iterator[Outcome]:
        workers = self.workers or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        if any(task.on_gpu for task in tasks) and not ray.cluster_resources().get("GPU"):
            raise EngineError("the model is on a GPU, and the Ray cluster has none: move it to the CPU")
        largest = max(
            (node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"]), default=0
        )
        call = ray.remote(_perform)
        waiting = sorted(tasks, key=lambda task: task.memory_bytes)  # popped from the end: largest first
        running: dict[Any, Task] = {}
        # Ray queues what does not fit in memory; an explicit `workers` is a hard limit.
        limit = self.workers or IN_FLIGHT_PER_WORKER * workers
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    task = waiting.pop()
                    # A request that no machine can satisfy would wait forever.
                    memory = min(task.memory_bytes, int(0.9 * largest))
                    options = call.options(
                        num_cpus=1,
                        num_gpus=int(task.on_gpu),
                        memory=memory,
                        max_retries=self.retries,
                        name=task.name,
                    )
                    running[options.remote(task)] = task
                (done,), _ = ray.wait(list(running), num_returns=1)
                yield require_success(self._receive(ray, done, running.pop(done)))
        finally:
            for reference in running:  # the run was abandoned, but the cluster lives on
                ray.cancel(reference, force=True)

    def _receive(self, ray: Any, reference: Any, task: Task) -> Outcome:
        try:
            outcome: Outcome = ray.get(reference)
        except ray.exceptions.RayError as error:
            lines = str(error).splitlines()
            raise worker_died_error(
                task, self.retries + 1, f"with this error from Ray: {lines[0] if lines else error!r}"
            ) from error
        return outcome


def _perform(task: Task) -> Outcome:
    import torch

    torch.set_num_threads(1)
    return perform(task)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            "the engine 'ray' needs ray: pip install 'factorpack[ray]', on every machine of the cluster; "
            "'local' needs nothing"
        ) from error
    return ray


def _connect(ray: Any, workers: int) -> bool:
    """Joins the running cluster, or starts one on this machine; returns whether there is one to shut down."""
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        ray.init(num_cpus=workers or None, include_dashboard=False, **quiet)
    return True
