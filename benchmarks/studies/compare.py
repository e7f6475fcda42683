"""Every method at the same sizes, through `factorpack.comparison`: without training, or fine-tuned on CIFAR-10."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
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
from benchmarks.measure import fidelity, predictions
from benchmarks.training import Augmented, Case, cifar_net, device, spread
from factorpack.budget.planner import Planner
from factorpack.comparison import Grid
from factorpack.comparison.opponents import choose_compared
from factorpack.tune.schedule import Schedule

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
    """Of a pretrained ImageNet model, or with `fp32_epochs` of a net trained on CIFAR-10 and fine-tuned there.

    One case a method: the sizes of its settings are looked up once for all ratios. Points are kept in a
    temporary folder, so that an interrupted run goes on.
    """
    names = choose_compared(methods or ["all"])
    work = partial(
        _case, model=model, ratios=ratios, samples=samples, schedule=schedule, fp32_epochs=fp32_epochs
    )
    original = _net(model, fp32_epochs)
    rows = spread(work, [{"method": name} for name in names], workers)
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
        Schedule(**settings),
        Planner(samples=samples),
        progress=False,
    ).run()
    return {"points": [asdict(point) for point in points]}


def _net(model: str, fp32_epochs: int) -> nn.Module:
    net = cifar_net(model, 0, fp32_epochs)[0] if fp32_epochs else pretrained(model)
    return net.to(device()).eval()


def _measured(candidate: nn.Module, model: str, fp32_epochs: int) -> Mapping[str, float]:
    """Accuracy and closeness to the original, as shares, of the net that was read back from a file."""
    images, labels = _images(fp32_epochs)
    answers = predictions(candidate.to(device()).eval(), images)
    found = fidelity(answers, _reference(model, fp32_epochs), labels)
    return {"top1": found["top1"] / 100, "agreement": found["agreement"] / 100, "kl": found["kl"]}


@cache
def _reference(model: str, fp32_epochs: int) -> Tensor:
    """The original's answers, once a process."""
    return predictions(_net(model, fp32_epochs), _images(fp32_epochs)[0])


def _images(fp32_epochs: int) -> Images:
    return cifar10()[1] if fp32_epochs else imagenet_val()
