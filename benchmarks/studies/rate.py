"""Accuracy against file size on CIFAR-10: the paper's settings, and codes trained to a target by a rate term.

All cases start from one FP32 net and are trained with one schedule and one teacher; batch norms are folded
before a file is measured.
"""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from typing import Any

import torch
from torch import nn

import factorpack as fp
from benchmarks.data import cifar10, normalized, shuffled
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.measure import reloaded, top1
from benchmarks.training import Augmented, Case, cifar_net, device, run_parallel
from factorpack.budget.norms import small_leftovers
from factorpack.methods import METHODS, from_fields

PLANNED_IMAGES = 1024


def run(
    model: str,
    fp32_epochs: int,
    seed: int,
    schedule: dict[str, Any],
    methods: list[dict[str, Any]],
    workers: int,
    train_images: int = 0,
) -> dict[str, Any]:
    """Each of a method's `target_ratios` is a case. `train_images` trains on that many images only, to try it out.

    The method "planned" starts from the model planned into the target's bytes on `PLANNED_IMAGES` images.
    With a `start` below 1 it is planned to that share of the target's ratio, and training does the rest.
    """
    _, fp32 = cifar_net(model, seed, fp32_epochs)
    cases = [case for method in methods for case in cases_of(method, schedule)]
    work = partial(_one, model=model, seed=seed, fp32_epochs=fp32_epochs, train_images=train_images)
    return {"fp32_test_top1": fp32, "rows": run_parallel(work, cases, workers)}


def cases_of(method: Case, schedule: Case) -> list[Case]:
    """One case per target, or one without a target."""
    fields = {
        key: value for key, value in method.items() if key not in ("layers", "target_ratios", "schedule")
    }
    plain = {"method": fields, "layers": method.get("layers", {})}
    own = schedule | method.get("schedule", {})
    targets = method.get("target_ratios", [])
    return [plain | {"schedule": own | {"target_ratio": target}} for target in targets or [0.0]]


def _one(case: Case, model: str, seed: int, fp32_epochs: int, train_images: int) -> Case:
    torch.backends.cuda.matmul.allow_tf32 = True
    net, _ = cifar_net(model, seed, fp32_epochs)
    train, test = cifar10()
    train = shuffled(train, seed)
    if train_images:
        train = (train[0][:train_images], train[1][:train_images])
    samples = PLANNED_IMAGES if case["method"]["method"] == "planned" else 64
    packed = _compressed(net, case, normalized(train[0][:samples].to(device())))
    before = top1(packed.load_into(copy.deepcopy(net)).eval(), test, batch=500)
    settings = dict(case["schedule"])
    batches = Augmented(train, settings.pop("batch", 64), pad=4, seed=seed)
    fp.finetune(
        packed,
        copy.deepcopy(net),
        batches,
        teacher=net,
        schedule=fp.Schedule(seed=seed, shrink_by="training", **settings),
        finish=partial(_folded, model=net),
        progress=False,
    )
    return {**case, "top1_before": before, **_measured(packed, net, test)}


def _compressed(net: nn.Module, case: Case, images: torch.Tensor) -> fp.Packed:
    if case["method"]["method"] == "planned":
        planner = fp.Planner(samples=len(images), fold_norms=False)  # the norms are still to be trained
        ratio = case["method"].get("start", 1.0) * case["schedule"]["target_ratio"]
        return fp.compress(net, ratio=ratio, calibration=images.split(64), planner=planner, progress=False)
    method = from_fields(METHODS, case["method"])
    layers = {pattern: from_fields(METHODS, fields) for pattern, fields in case["layers"].items()}
    return fp.compress(net, method, layers=layers, calibration=[images], progress=False)


def _folded(packed: fp.Packed, model: nn.Module) -> fp.Packed:
    return fp.Packed(small_leftovers(packed, model), packed.aliases)


def _measured(packed: fp.Packed, net: nn.Module, test: tuple[torch.Tensor, torch.Tensor]) -> Case:
    """Size and accuracy of the file, read back."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = reloaded(packed, folder)
        report = loaded.size()
        after = top1(loaded.load_into(copy.deepcopy(net)).eval(), test, batch=500)
    return {
        "top1": after,
        "file_bytes": report.file_bytes,
        "file_ratio": report.file_ratio,
        "paper_ratio": report.paper_ratio,
    }


def tabulate(case: str) -> str:
    """Trained to sizes on CIFAR-10: the paper's settings, and nets planned to a budget."""
    document = load_result("rate", case)
    outcome, schedule = document["result"], document["settings"]["schedule"]
    rows = [
        [
            _describe(row["method"]),
            f"{row['schedule']['learning_rate']:g}",
            f"{row['file_ratio']:.1f}",
            f"{row['file_bytes']:,}",
            f"{row['top1_before']:.2f}",
            f"{row['top1']:.2f}",
        ]
        for row in outcome["rows"]
    ]
    head = ["start", "learning rate", "file ratio", "bytes", "top-1 before", "trained"]
    words = f"{schedule['epochs']} epochs each in batches of {schedule['batch']}, 10,000 test images"
    note = f"FP32 {outcome['fp32_test_top1']:.2f}; {words}.\n"
    return f"{format_table(head, rows)}\n{note}{format_source(document)}"


def _describe(method: dict[str, Any]) -> str:
    if method["method"] == "planned":
        start = method.get("start", 1.0)
        size = "" if start == 1 else f" at {start:g} of the ratio"
        return f"**planned**{size}, then a rate term"
    return f"QSPCA, rank {method['rank']}, {method['latent_bits']} bits, {method['sparsity']:.0%} sparse"


TABLES = {"trained": partial(tabulate, "resnet18"), "trained-long": partial(tabulate, "resnet18-long")}
