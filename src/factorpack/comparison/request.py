"""A comparison as it is asked for: paths and settings, from which any process makes the same grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.budget.goals import original_bytes
from factorpack.budget.knowledge import MOMENT_BYTES
from factorpack.budget.planner import Planner
from factorpack.comparison.grid import Evaluate, Grid, Point, files_of
from factorpack.comparison.opponents import PLANNED, choose_compared
from factorpack.engine import Engine, Task, outcomes
from factorpack.errors import PlanError
from factorpack.format.locks import locked
from factorpack.format.overwrite import check_output
from factorpack.per_tensor import BASE_BYTES
from factorpack.source import model_from, open_source
from factorpack.tune.accuracy import evaluate
from factorpack.tune.images import ImageFolder, image_folder, loader, unlabelled
from factorpack.tune.models import device, weights_into
from factorpack.tune.schedule import Schedule

WRITTEN = ("compare.json", "compare.md", "compare.png", "compare.svg")
"""What a comparison leaves beside its points and their files."""
COPIES = 6
"""Of a model in FP32 that a point takes at most: originals, decoded ones, and what measures them."""


@dataclass(frozen=True)
class Request:
    """What `factorpack compare` is told."""

    source: Path
    model: str
    output: Path
    methods: Sequence[str]
    ratios: Sequence[float]
    calibration: Path | None = None
    data: Path | None = None
    epochs: int = 0
    learning_rate: float = 3e-4
    samples: int = 256
    batch_size: int = 64
    image_size: int = 224
    workers: int = 2
    """Processes that read pictures."""

    def run(self, engine: Engine | None, progress: bool) -> tuple[list[Point], Mapping[str, float]]:
        """Every point, and what was measured of the original.

        With an engine points are its workers', each of which writes its own as they come.
        """
        if self.epochs and self.data is None:
            raise PlanError("--epochs trains on pictures: say where they are with --data")
        for written in (*WRITTEN, *files_of(choose_compared(self.methods), self.ratios)):
            check_output(self.output / written, self.source, self.calibration, self.data)
        grid = self.grid(progress)
        grid.check()
        self.output.mkdir(parents=True, exist_ok=True)
        with locked(self.output / "compare.json"):
            if engine is not None:
                for _ in outcomes(engine, self.tasks(), "comparing", progress, "points"):
                    pass
            points = grid.run()
            return points, grid.evaluate(grid.model) if grid.evaluate is not None else {}

    def tasks(self) -> list[Task]:
        """One a method, which looks up the sizes of its settings once; the planner's points one by one."""
        need = BASE_BYTES + COPIES * original_bytes(open_source(self.source))
        need += MOMENT_BYTES if self.calibration is not None else 0
        told = replace(
            self,
            source=self.source.absolute(),
            output=self.output.absolute(),
            calibration=self.calibration and self.calibration.absolute(),
            data=self.data and self.data.absolute(),
            workers=0,  # a worker reads its pictures itself: it may have no processes of its own
        )
        return [
            Task(name, make_points, (replace(told, methods=[name], ratios=ratios),), need, len(ratios))
            for name in choose_compared(self.methods)
            for ratios in ([[ratio] for ratio in self.ratios] if name == PLANNED else [self.ratios])
        ]

    def grid(self, progress: bool) -> Grid:
        net = weights_into(model_from(self.model), self.source).to(device()).eval()
        batches = []
        if self.calibration is not None:
            batches = list(unlabelled(self.calibration, self.samples, self.image_size))
        train = None
        if self.epochs and self.data is not None:
            folder = ImageFolder(image_folder(self.data, "train"), self.image_size, augment=True)
            train = loader(folder, self.batch_size, self.workers, shuffle=True)
        return Grid(
            net,
            self.ratios,
            self.output,
            self.methods,
            batches,
            self._evaluate(),
            train,
            Schedule(epochs=max(self.epochs, 1), learning_rate=self.learning_rate),
            Planner(samples=self.samples),
            progress=progress,
        )

    def _evaluate(self) -> Evaluate | None:
        if self.data is None:
            return None
        pictures = ImageFolder(image_folder(self.data, "val"), self.image_size)
        return partial(_accuracy, loader(pictures, self.batch_size, self.workers))


def make_points(request: Request) -> None:
    """A worker's task: points of the folder, each written when it is measured."""
    request.grid(progress=False).run()


def _accuracy(pictures: Iterable[Any], candidate: nn.Module) -> Mapping[str, float]:
    found = evaluate(candidate, pictures, progress=False)
    return {"top1": found.top1, "top5": found.top5}
