"""Models planned into a budget, without training, beside the paper's method and its peers at those sizes."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import factorpack as fp
from benchmarks.data import imagenet_train, imagenet_val, normalized, pretrained, shuffled
from benchmarks.measure import fidelity, predictions, reloaded, top1
from benchmarks.training import device, spread
from factorpack.methods import METHODS, from_fields, samples_of

HELD = 200
BATCH = 50


def run(
    model: str,
    samples: int,
    workers: int,
    ratios: list[float],
    planners: list[dict[str, Any]] | None = None,
    peers: list[dict[str, Any]] | None = None,
    rank_search: list[dict[str, Any]] | None = None,
    measure: str = "val",
) -> dict[str, Any]:
    """Every planner at every ratio; peers as they are; and `rank_search`, methods whose rank is found.

    `measure` is "val", the 2,000 validation images, or "held": the last 200 of the training images, for
    choosing settings. Those are then not calibrated on.
    """
    cases: list[dict[str, Any]] = []
    for planner in planners or [{"name": "planned"}]:
        settings = {key: value for key, value in planner.items() if key != "name"}
        cases += [{"name": planner["name"], "ratio": ratio, "planner": settings} for ratio in ratios]
    for fields in rank_search or []:
        cases += [{"name": "qspca", "ratio": ratio, "method": {**fields, "rank": 0}} for ratio in ratios]
    cases += [{"name": fields["method"], "method": fields} for fields in peers or []]
    rows = spread(partial(_case, model=model, samples=samples, measure=measure), cases, workers)
    fp32 = top1(pretrained(model).to(device()), _images(measure))
    return {"fp32": fp32, "rows": rows}


def _case(case: dict[str, Any], model: str, samples: int, measure: str) -> dict[str, Any]:
    net = pretrained(model).to(device())
    images = shuffled(imagenet_train())[0]
    if measure == "held" and samples > len(images) - HELD:
        raise ValueError(f"{samples} samples leave none of {len(images)} images to measure on")
    batches = [normalized(batch.to(device())) for batch in images[:samples].split(BATCH)]
    started = time.perf_counter()
    if "planner" in case:
        settings = dict(case["planner"])
        steps = settings.pop("reconstruct", 0)
        planner = fp.Planner(samples=samples, **settings)
        packed = fp.compress(net, ratio=case["ratio"], calibration=batches, planner=planner, progress=False)
        if steps:
            packed = fp.tune.reconstruct(packed, net, batches, steps=steps, progress=False)
    else:
        fields = case["method"]
        if fields.get("rank") == 0:
            fields = case["method"] = {**fields, "rank": _rank(fields, case["ratio"], model)}
        method = from_fields(METHODS, fields)
        calibration = batches if samples_of(method) else None
        packed = fp.compress(net, method, calibration=calibration, progress=False)
    seconds = round(time.perf_counter() - started, 1)
    return {**case, "seconds": seconds, **measured(packed, model, measure)}


def _rank(fields: dict[str, Any], ratio: float, model: str) -> int:
    """The largest rank whose file, found from the weights alone, is `ratio` times smaller."""
    settings = {key: value for key, value in fields.items() if key != "solver"}
    low, high = 1, 257
    while high - low > 1:
        rank = (low + high) // 2
        method = from_fields(METHODS, {**settings, "rank": rank})
        packed = fp.compress(pretrained(model), method, progress=False)
        low, high = (rank, high) if _ratio(packed) >= ratio else (low, rank)
    return low


def _ratio(packed: fp.Packed) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return reloaded(packed, folder).size().file_ratio or 0.0


def measured(packed: fp.Packed, model: str, measure: str) -> dict[str, Any]:
    """Size of the file on disk, and how the model read back from it answers."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = reloaded(packed, folder)
        report = loaded.size()
        images, labels = _images(measure)
        reference = predictions(pretrained(model).to(device()), images)
        answers = predictions(loaded.load_into(pretrained(model)).to(device()).eval(), images)
    sizes = {"file_bytes": report.file_bytes, "file_ratio": report.file_ratio}
    return {**sizes, **fidelity(answers, reference, labels)}


def _images(measure: str) -> Any:
    if measure == "val":
        return imagenet_val()
    images, labels = shuffled(imagenet_train())
    return images[-HELD:], labels[-HELD:]
