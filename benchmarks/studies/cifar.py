"""Fine-tuned Pareto curves on CIFAR-10: the paper's settings, trained with one budget, measured on files."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from typing import Any

import torch

import factorpack as fp
from benchmarks.data import cifar10, normalized, shuffled
from benchmarks.formatting import describe_schedule, format_source, format_table, load_result, qspca_cells
from benchmarks.measure import reloaded, top1
from benchmarks.training import Augmented, case_of, cifar_net, device, run_parallel
from factorpack.methods import METHODS, from_fields

HELD_OUT = 5000


def run(
    model: str,
    fp32_epochs: int,
    seed: int,
    schedule: dict[str, Any],
    methods: list[dict[str, Any]],
    workers: int,
    measure_on: str = "test",
) -> dict[str, Any]:
    """`measure_on` "train" trains without the last 5,000 training images and measures on those."""
    _, fp32 = cifar_net(model, seed, fp32_epochs)
    cases = [case_of(method, schedule) for method in methods]
    work = partial(_one, model=model, seed=seed, fp32_epochs=fp32_epochs, measure_on=measure_on)
    return {"fp32_test_top1": fp32, "rows": run_parallel(work, cases, workers)}


def _one(case: dict[str, Any], model: str, seed: int, fp32_epochs: int, measure_on: str) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = True
    net, _ = cifar_net(model, seed, fp32_epochs)
    train, test = cifar10()
    train = shuffled(train, seed)
    if measure_on == "train":
        train, test = tuple(each[:-HELD_OUT] for each in train), tuple(each[-HELD_OUT:] for each in train)
    settings = dict(case["schedule"])
    batch = settings.pop("batch", 64)
    calibration = [normalized(train[0][:64].to(device()))]
    packed = fp.compress(net, from_fields(METHODS, case["method"]), calibration=calibration, progress=False)
    before = top1(packed.load_into(copy.deepcopy(net)).eval(), test, batch=500)
    with tempfile.TemporaryDirectory() as folder:
        start = reloaded(packed, folder).size()
        fp.finetune(
            packed,
            copy.deepcopy(net),
            Augmented(train, batch, pad=4, seed=seed),
            teacher=net,
            schedule=fp.Schedule(seed=seed, **settings),
            progress=False,
        )
        loaded = reloaded(packed, folder)
        report = loaded.size()
        after = top1(loaded.load_into(copy.deepcopy(net)).eval(), test, batch=500)
    return {
        **case,
        "top1_before": before,
        "top1": after,
        "file_ratio_before": start.file_ratio,
        "file_ratio": report.file_ratio,
        "paper_ratio": report.paper_ratio,
    }


def tabulate(model: str) -> str:
    document = load_result("cifar", model)
    outcome, settings = document["result"], document["settings"]
    rows = [
        [
            *qspca_cells(row["method"]),
            f"{row['paper_ratio']:.2f}",
            f"{row['file_ratio']:.2f}",
            f"{row['top1_before']:.2f}",
            f"{row['top1']:.2f}",
        ]
        for row in sorted(outcome["rows"], key=lambda row: row["file_ratio"])
    ]
    head = ["rank", "bits", "sparsity", "paper's ratio", "file ratio", "top-1 before", "fine-tuned"]
    schedule = describe_schedule(settings["schedule"])
    note = f"FP32 {outcome['fp32_test_top1']:.2f}; seed {settings['seed']}; {schedule}.\n"
    return f"{format_table(head, rows)}\n{note}{format_source(document)}"


def tabulate_rank_or_bits() -> str:
    document = load_result("cifar", "resnet18")
    rows = [
        [f"{ratio}x", *qspca_cells(row["method"]), f"{row['paper_ratio']:.2f}", f"{row['top1']:.2f}"]
        for ratio in (11, 25)
        for row in near(document["result"]["rows"], ratio)
    ]
    head = ["near", "rank", "bits", "sparsity", "paper's ratio", "top-1"]
    return f"{format_table(head, rows)}\n{format_source(document)}"


def near(rows: list[dict[str, Any]], ratio: float) -> list[dict[str, Any]]:
    """Results whose ratio by the paper's formula is within 12 % of `ratio`, the smallest rank first."""
    close = [row for row in rows if abs(row["paper_ratio"] / ratio - 1) < 0.12]
    return sorted(close, key=lambda row: (row["method"]["rank"], row["method"]["latent_bits"]))


TABLES = {
    "cifar-resnet18": partial(tabulate, "resnet18"),
    "cifar-mobilenet_v2": partial(tabulate, "mobilenet_v2"),
    "rank-or-bits": tabulate_rank_or_bits,
}
