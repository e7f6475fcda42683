"""A calibrated budget over an engine: gradients batch by batch, curves and divergences weight by weight.

The driver runs the network in order: it gathers moments, and codes each weight after the ones before. What it
gets back does not depend on who did it, nor when: sums are added up in the order of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.batches import device_of
from factorpack.budget.candidates import planning_bytes
from factorpack.budget.curves import Curve
from factorpack.budget.planner import BudgetRequest, Planner
from factorpack.budget.sensitivity import Information, batches_of, label_states, sum_gradients
from factorpack.budget.trial import CPU_BORDER_BYTES
from factorpack.budget.worker_tasks import (
    SharedModel,
    measure_curves_of,
    measure_divergence_of,
    save_weights,
    share_model,
    show_batch,
)
from factorpack.calibration.calibrate import Calibration
from factorpack.engine import Engine, Task, keep_workers, run_tasks
from factorpack.methods import SecondOrder
from factorpack.passes.resident import weight_bytes
from factorpack.per_tensor import BASE_BYTES, work_file_name
from factorpack.progress import Showing
from factorpack.weight import Weight

MODEL_COPIES = 3
"""Of a model's weights in a worker: as they are read, one to change, and for gradients and activations."""


@dataclass(frozen=True, slots=True)
class _Put:
    """Weights in a file, and the memory that it takes to plan them."""

    file: Path
    memory_bytes: int


class Workers:
    """An engine's workers, for one model and its calibration data."""

    def __init__(self, engine: Engine, folder: Path, progress: Showing) -> None:
        """`folder` is for files that the workers read."""
        self._engine, self._folder, self._progress = engine, folder, progress
        self._known: Callable[[], SharedModel] | None = None
        self._shared_model: SharedModel | None = None
        self._put: dict[str, _Put] = {}
        self._device, self._model_bytes = "cpu", 0

    def know(self, model: nn.Module, calibration: Calibration, held_out: Calibration | None) -> None:
        """The model that all work is about; its file is written when a task needs it."""
        self._device, self._model_bytes = device_of(model).type, weight_bytes(model)
        self._known = lambda: share_model(model, calibration, held_out, self._folder, self._device)

    def measure_information(
        self, model: nn.Module, calibration: Calibration, layers: Sequence[str], samples: int
    ) -> dict[str, Information]:
        """`sensitivity.measure_information`, a task per batch."""
        batches = batches_of(calibration, samples) if layers else []
        memory = MODEL_COPIES * self._model_bytes
        tasks = [
            self._task(f"batch {index}", memory, show_batch, self._shared(), index, tuple(layers), state)
            for index, state in enumerate(label_states(model, batches))
        ]
        shown = {
            outcome.task.name: outcome.value
            for outcome in run_tasks(self._engine, tasks, "measuring", self._progress)
        }
        return sum_gradients(model, calibration, layers, (shown[task.name] for task in tasks))

    def put(self, weights: Mapping[str, Weight]) -> None:
        """Writes weights that are planned together, for the tasks about them."""
        file = self._folder / work_file_name("weights", *weights)
        save_weights(file, weights)
        memory = planning_bytes(sum(weight.numel for weight in weights.values()))
        self._put |= dict.fromkeys(weights, _Put(file, memory))

    def measure_curves(
        self, names: Sequence[str], planner: Planner, bits: float
    ) -> Iterator[dict[str, Curve]]:
        """Curves of the groups of weights that have been put with these, as they are finished."""
        tasks = [
            self._task(
                name,
                self._put[name].memory_bytes,
                measure_curves_of,
                self._put[name].file,
                planner,
                bits,
                self._device,
            )
            for name in names
        ]
        for outcome in self._engine.run(tasks):
            yield outcome.value

    def measure_divergences(
        self, wanted: Mapping[str, tuple[SecondOrder, float]]
    ) -> Iterator[tuple[str, float]]:
        """What weights that have been put do alone, each by a method at a step, as they are finished."""
        more = MODEL_COPIES * self._model_bytes + CPU_BORDER_BYTES
        tasks = [
            self._task(
                name,
                self._put[name].memory_bytes + more,
                measure_divergence_of,
                self._shared(),
                self._put[name].file,
                name,
                method,
                step,
            )
            for name, (method, step) in wanted.items()
        ]
        for outcome in self._engine.run(tasks):
            yield outcome.task.name, outcome.value

    def _shared(self) -> SharedModel:
        if self._shared_model is None:
            assert self._known is not None
            self._shared_model = self._known()
        return self._shared_model

    def _task(self, name: str, memory: int, function: Callable[..., Any], *arguments: Any) -> Task:
        return Task(name, function, arguments, BASE_BYTES + memory, on_gpu=self._device == "cuda")


@contextmanager
def open_workers(request: BudgetRequest) -> Iterator[Workers | None]:
    """Workers that stay until the block ends; None where a request names no engine."""
    if request.engine is None:
        yield None
        return
    assert request.parts is not None, "workers read files in the folder of finished work"
    with keep_workers(request.engine) as kept:
        yield Workers(kept, request.parts, request.progress)
