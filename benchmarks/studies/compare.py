"""Every method at the same sizes, through `factorpack.comparison`: without training, or fine-tuned on CIFAR-10."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data import (
    Images,
    cifar10,
    imagenet_train,
    imagenet_val,
    normalized,
    pretrained,
    shuffled,
)
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.measure import fidelity, predictions
from benchmarks.training import Augmented, Case, cifar_net, device, run_parallel
from factorpack.budget.planner import Planner
from factorpack.comparison import Grid, Point
from factorpack.comparison.baselines import select_methods
from factorpack.comparison.grid import ON_ALL

BATCH = 50


def run(
    model: str,
    ratios: list[float],
    workers: int,
    samples: int,
    methods: list[str] | None = None,
    schedule: dict[str, Any] | None = None,
    fp32_epochs: int = 0,
) -> dict[str, Any]:
    """On a pretrained ImageNet model, or, with `fp32_epochs`, on a net trained on CIFAR-10 and fine-tuned there.

    One case per method: the sizes of its settings are looked up once for all ratios. Points are kept in a
    temporary folder, so that an interrupted run continues.
    """
    names = select_methods(methods or ["all"])
    work = partial(
        _case, model=model, ratios=ratios, samples=samples, schedule=schedule, fp32_epochs=fp32_epochs
    )
    original = _net(model, fp32_epochs)
    rows = run_parallel(work, [{"method": name} for name in names], workers)
    measured = _measured(original, model, fp32_epochs)
    return {"original": measured, "points": [point for row in rows for point in row["points"]]}


def _case(
    case: Case,
    model: str,
    ratios: list[float],
    samples: int,
    schedule: dict[str, Any] | None,
    fp32_epochs: int,
) -> Case:
    torch.backends.cuda.matmul.allow_tf32 = bool(schedule)
    net = _net(model, fp32_epochs)
    images = shuffled(cifar10()[0] if fp32_epochs else imagenet_train())
    batches = [normalized(batch.to(device())) for batch in images[0][:samples].split(BATCH)]
    settings = dict(schedule or {})
    train = Augmented(images, settings.pop("batch", 64), pad=4) if schedule else None
    points = Grid(
        net,
        ratios,
        Path(tempfile.gettempdir()) / f"factorpack-compare-{model}-{fp32_epochs}",
        [case["method"]],
        batches,
        partial(_measured, model=model, fp32_epochs=fp32_epochs),
        train,
        replace(ON_ALL, **settings),
        Planner(samples=samples),
        progress=False,
    ).run()
    return {"points": [asdict(point) for point in points]}


def _net(model: str, fp32_epochs: int) -> nn.Module:
    net = cifar_net(model, 0, fp32_epochs)[0] if fp32_epochs else pretrained(model)
    return net.to(device()).eval()


def _measured(candidate: nn.Module, model: str, fp32_epochs: int) -> Mapping[str, float]:
    """Accuracy of the net that was read back from a file, and its closeness to the original, as shares."""
    images, labels = _images(fp32_epochs)
    logits = predictions(candidate.to(device()).eval(), images)
    found = fidelity(logits, _reference(model, fp32_epochs), labels)
    return {"top1": found["top1"] / 100, "agreement": found["agreement"] / 100, "kl": found["kl"]}


@cache
def _reference(model: str, fp32_epochs: int) -> Tensor:
    """The original's logits, computed once per process."""
    return predictions(_net(model, fp32_epochs), _images(fp32_epochs)[0])


def _images(fp32_epochs: int) -> Images:
    return cifar10()[1] if fp32_epochs else imagenet_val()


def points_of(case: str) -> tuple[list[Point], dict[str, float]]:
    """The points of a stored comparison, and what was measured on the original."""
    outcome = load_result("compare", case)["result"]
    return [Point(**point) for point in outcome["points"]], outcome["original"]


def tabulate(case: str) -> str:
    """One row per method, one column per size: top-1 of the file, and its real ratio."""
    document = load_result("compare", case)
    points, original = points_of(case)
    head = ["method", *(f"{ratio:g}x" for ratio in document["settings"]["ratios"])]
    note = f"Original {100 * original['top1']:.1f}. In parentheses the real ratio of the file.\n"
    return f"{format_table(head, _rows(points, _score))}\n{note}{format_source(document)}"


def _score(point: Point) -> str:
    if not point.file:
        return point.settings.replace(" is the smallest it makes", " at most")
    return f"{100 * point.measured['top1']:.1f} ({point.file_ratio:.1f}x)"


def tabulate_seconds() -> str:
    """How long each method took for ResNet18, size by size."""
    document = load_result("compare", "resnet18")
    points, _ = points_of("resnet18")
    rows = _rows(points, lambda point: f"{point.compress_s:.1f}" if point.file else "-")
    head = ["seconds to compress ResNet18", *(f"{ratio:g}x" for ratio in document["settings"]["ratios"])]
    return f"{format_table(head, rows)}\n{format_source(document)}"


def _rows(points: list[Point], cell: Callable[[Point], str]) -> list[list[str]]:
    titles = {point.method: point.title for point in points}
    titles["planned"] = f"**{titles['planned']}**"
    return [
        [title, *(cell(point) for point in points if point.method == name)] for name, title in titles.items()
    ]


TABLES = {
    "compared-resnet18": partial(tabulate, "resnet18"),
    "compared-mobilenet_v2": partial(tabulate, "mobilenet_v2"),
    "compared-seconds": tabulate_seconds,
    "compared-resnet18-cifar": partial(tabulate, "resnet18-cifar"),
    "compared-mobilenet_v2-cifar": partial(tabulate, "mobilenet_v2-cifar"),
}
