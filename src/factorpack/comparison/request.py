"""A requested comparison: paths and settings, from which any process builds the same grid."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.budget.goals import original_bytes
from factorpack.budget.knowledge import MOMENT_BYTES
from factorpack.budget.planner import Planner
from factorpack.comparison.baselines import PLANNED, select_methods
from factorpack.comparison.grid import ON_ALL, Evaluate, Grid
from factorpack.comparison.point import Point, files_of
from factorpack.engine import Engine, Task, run_tasks
from factorpack.errors import PlanError
from factorpack.format.locks import locked
from factorpack.format.overwrite import check_output, make_folder
from factorpack.model_reference import import_model
from factorpack.per_tensor import BASE_BYTES
from factorpack.progress import Showing
from factorpack.source import open_source
from factorpack.tune.accuracy import evaluate
from factorpack.tune.images import ImageFolder, image_folder, loader, unlabelled_batches
from factorpack.tune.models import default_device, load_weights

OUTPUTS = ("compare.json", "compare.md", "compare.png", "compare.svg")
"""Files a comparison writes in addition to its points."""
COPIES = 6
"""FP32 copies of a model that one point holds at most: originals, decoded ones, and those measured."""


@dataclass(frozen=True)
class Request:
    """The settings of `factorpack compare`."""

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
    """Processes that load images."""

    def run(self, engine: Engine | None, progress: Showing) -> tuple[list[Point], Mapping[str, float]]:
        """Returns every point, and the scores of the original model.

        With an engine, its workers compute the points and each writes its own.
        """
        if self.epochs and self.data is None:
            raise PlanError("--epochs needs images to train on: give their folder with --data")
        for written in (*OUTPUTS, *files_of(select_methods(self.methods), self.ratios)):
            check_output(self.output / written, self.source, self.calibration, self.data)
        grid = self.grid(progress)
        grid.check()
        make_folder(self.output)
        with locked(self.output / "compare.json"):
            if engine is not None:
                for _ in run_tasks(engine, self.tasks(), "comparing", progress):
                    pass
            points = grid.run()
            return points, grid.evaluate(grid.model) if grid.evaluate is not None else {}

    def tasks(self) -> list[Task]:
        """One task per method, to measure the sizes of its settings only once; one per point of the planner."""
        need = BASE_BYTES + COPIES * original_bytes(open_source(self.source))
        need += MOMENT_BYTES if self.calibration is not None else 0
        absolute = replace(
            self,
            source=self.source.absolute(),
            output=self.output.absolute(),
            calibration=self.calibration and self.calibration.absolute(),
            data=self.data and self.data.absolute(),
            workers=0,  # an engine's worker loads images itself: it may not start processes
        )
        return [
            Task(name, make_points, (replace(absolute, methods=[name], ratios=ratios),), need, len(ratios))
            for name in select_methods(self.methods)
            for ratios in ([[ratio] for ratio in self.ratios] if name == PLANNED else [self.ratios])
        ]

    def grid(self, progress: Showing) -> Grid:
        net = load_weights(import_model(self.model), self.source).to(default_device()).eval()
        batches = []
        if self.calibration is not None:
            batches = list(unlabelled_batches(self.calibration, self.samples, self.image_size))
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
            replace(ON_ALL, epochs=max(self.epochs, 1), learning_rate=self.learning_rate),
            Planner(samples=self.samples),
            progress=progress,
            data=self._data_mark(),
        )

    def _data_mark(self) -> str:
        """What accuracy is measured and trained on: the names and sizes of all images, and how they are cropped."""
        if self.data is None:
            return ""
        splits = ["train", "val"] if self.epochs else ["val"]
        folders = [ImageFolder(image_folder(self.data, split), self.image_size) for split in splits]
        listed = [
            (str(path.relative_to(each.folder)), path.stat().st_size)
            for each in folders
            for path, _ in each.files
        ]
        return hashlib.sha256(repr((self.image_size, self.batch_size, listed)).encode()).hexdigest()

    def _evaluate(self) -> Evaluate | None:
        if self.data is None:
            return None
        images = ImageFolder(image_folder(self.data, "val"), self.image_size)
        return partial(_accuracy, loader(images, self.batch_size, self.workers))


def make_points(request: Request) -> None:
    """A worker's task: computes points and writes each to the folder."""
    request.grid(progress=False).run()


def _accuracy(images: Iterable[Any], candidate: nn.Module) -> Mapping[str, float]:
    accuracy = evaluate(candidate, images, progress=False)
    return {"top1": accuracy.top1, "top5": accuracy.top5}
