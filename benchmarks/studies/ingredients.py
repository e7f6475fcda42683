"""What each ingredient of the planner is worth: without one at a time, at several seeds of the calibration inputs."""

from __future__ import annotations

import math
import statistics
import tempfile
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import imagenet_train, normalized, pretrained, shuffled
from benchmarks.formatting import format_source, format_table, is_stored, load_result
from benchmarks.llamas import FETCHED, sampled_tokens
from benchmarks.measure import divergence_from, log_probabilities, reloaded
from benchmarks.training import device, run_parallel, share_cores
from factorpack.calibration.synthetic import Synthetic, make_batches

Row = dict[str, Any]
MODELS = {"resnet18": "ResNet18", "mobilenet_v2": "MobileNetV2", "stories15m": "Llama, 15 million weights"}
TEXTS = "stories15m"
BATCH = 50
HELD_IMAGES = 300
LENGTH, HELD_TEXTS, HELD_SEED = 128, 48, 1000
"""Tokens of a text; texts to measure on; their seed, which is none of those to calibrate with."""


def run(
    model: str, samples: int, workers: int, ratios: list[float], seeds: list[int], planners: list[Row]
) -> Row:
    """Every planner at every seed and ratio; the first planner is the base."""
    cases = [
        {"name": planner["name"], "seed": seed, "ratio": ratio, "planner": _fields(planner)}
        for planner in planners
        for seed in seeds
        for ratio in ratios
    ]
    work = partial(_case, model=model, samples=samples, workers=workers)
    return {"rows": run_parallel(work, cases, workers)}


def _fields(planner: Row) -> Row:
    return {key: value for key, value in planner.items() if key != "name"}


def _case(case: Row, model: str, samples: int, workers: int) -> Row:
    share_cores(workers)
    make = partial(fp.hub.from_pretrained, FETCHED / model) if model == TEXTS else partial(pretrained, model)
    net: nn.Module = make().to(device())
    inputs_of = _texts if model == TEXTS else _images
    calibration, held = inputs_of(net, samples, case["seed"])
    expected = [log_probabilities(net, batch).float() for batch in held]
    planner = fp.Planner(samples=samples, **case["planner"])
    packed = fp.compress(net, ratio=case["ratio"], calibration=calibration, planner=planner, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        loaded = reloaded(packed, folder)
        other = loaded.load_into(make()).to(device()).eval()
        divergence = divergence_from(expected, other, held)
        found = {"file_ratio": loaded.size().file_ratio, "divergence": divergence}
    return {"name": case["name"], "seed": case["seed"], "ratio": case["ratio"], **found}


def _images(net: nn.Module, samples: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:  # noqa: ARG001
    """Training images to calibrate with, and others to measure on."""
    images = shuffled(imagenet_train())[0]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return _batches(images[order[:samples]]), _batches(images[order[-HELD_IMAGES:]])


def _batches(images: Tensor) -> list[Tensor]:
    return [normalized(each.to(device())) for each in images.split(BATCH)]


def _texts(net: nn.Module, samples: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Texts that the model writes: to calibrate with, and others to measure on."""
    calibration = make_batches(net, Synthetic(length=LENGTH, seed=seed), samples, progress=False)
    held = sampled_tokens(net, HELD_TEXTS, LENGTH, HELD_SEED)
    return calibration, [{"input_ids": each} for each in held.split(8)]


def tabulate() -> str:
    """One row per model and planner: the mean over the seeds at each ratio, and what the ingredient is worth."""
    documents = {
        model: load_result("ingredients", model) for model in MODELS if is_stored("ingredients", model)
    }
    if not documents:
        return "Not stored yet: `python -m benchmarks.run benchmarks/experiments/ingredients`.\n"
    rows = []
    for model, document in documents.items():
        by_name = _by_name(document["result"]["rows"])
        base = next(iter(by_name.values()))
        for name, found in by_name.items():
            each = [f"{ratio:g}x: {_mean_and_deviation(found, ratio)}" for ratio in _ratios(found)]
            rows.append([MODELS[model], name, *each, "" if found is base else _change(found, base)])
    head = ["model", "planner", "KL, nats, at the larger size", "at the smaller size", "change"]
    return f"{format_table(head, rows)}\n{format_source(*documents.values())}"


def _by_name(rows: list[Row]) -> dict[str, list[Row]]:
    return {name: list(some) for name, some in groupby(rows, lambda row: str(row["name"]))}


def _ratios(rows: list[Row]) -> list[float]:
    return sorted({row["ratio"] for row in rows})


def _mean_and_deviation(rows: list[Row], ratio: float) -> str:
    found = [row["divergence"] for row in rows if row["ratio"] == ratio]
    return f"{statistics.mean(found):.4f} ± {statistics.stdev(found):.4f}"


def _change(rows: list[Row], base: list[Row]) -> str:
    """The geometric mean of the ratios of divergences, and its standard error, in percent."""
    logs = [math.log(one["divergence"] / other["divergence"]) for one, other in zip(rows, base, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{100 * math.expm1(statistics.mean(logs)):+.0f} % ± {100 * error:.0f} %"


TABLES = {"ingredients": tabulate}
