"""Models planned into a budget, without training, beside the paper's method and its peers at those sizes."""

from __future__ import annotations

import tempfile
import time
from functools import cache, partial
from typing import Any

from torch import Tensor

import factorpack as fp
from benchmarks.data import imagenet_train, imagenet_val, normalized, pretrained, shuffled
from benchmarks.formatting import MODELS, format_source, format_table, load_result
from benchmarks.measure import fidelity, predictions, reloaded, top1
from benchmarks.training import device, run_parallel, share_cores
from factorpack.methods import METHODS, from_fields

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
    work = partial(_case, model=model, samples=samples, measure=measure, workers=workers)
    rows = run_parallel(work, cases, workers)
    fp32 = top1(pretrained(model).to(device()), _images(measure))
    return {"fp32": fp32, "rows": rows}


def _case(case: dict[str, Any], model: str, samples: int, measure: str, workers: int) -> dict[str, Any]:
    if device().type == "cpu":
        share_cores(workers)
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
        calibration = batches if method.samples else None
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
    """Size of the file on disk, and how close the outputs of the model read back from it are."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = reloaded(packed, folder)
        report = loaded.size()
        images, labels = _images(measure)
        reference = _reference(model, measure)
        logits = predictions(loaded.load_into(pretrained(model)).to(device()).eval(), images)
    sizes = {"file_bytes": report.file_bytes, "file_ratio": report.file_ratio}
    return {**sizes, **fidelity(logits, reference, labels)}


@cache
def _reference(model: str, measure: str) -> Tensor:
    """The original's predictions."""
    return predictions(pretrained(model).to(device()), _images(measure)[0])


def _images(measure: str) -> Any:
    if measure == "val":
        return imagenet_val()
    images, labels = shuffled(imagenet_train())
    return images[-HELD:], labels[-HELD:]


def tabulate(model: str) -> str:
    """Planned files at each ratio, then every other method at its own sizes, largest files first."""
    document = load_result("budget", model)
    rows = [
        [
            _describe(row),
            f"{row['file_ratio']:.2f}",
            f"{row['top1']:.1f}",
            f"{row['agreement']:.1f}",
            f"{row['kl']:.3f}",
        ]
        for row in sorted(document["result"]["rows"], key=lambda row: (_describe(row), row["file_ratio"]))
    ]
    head = ["method", "file ratio", "top-1", "agreement with FP32", "KL, nats"]
    fp32, samples = document["result"]["fp32"], document["settings"]["samples"]
    note = f"FP32 {fp32:.1f} on these 2,000 images; {samples:,} unlabelled images, no training.\n"
    return f"{format_table(head, rows)}\n{note}{format_source(document)}"


def _describe(row: dict[str, Any]) -> str:
    if "planner" in row:
        return "**planned**"
    method = row["method"]
    if method["method"] == "qspca":
        return f"the paper's QSPCA, {method['latent_bits']} bits, the rank that fits"
    name = "error feedback" if method["method"] == "second_order" else "rounding to nearest"
    return f"{name}, {method['bits']} bits, one scale per channel"


def tabulate_headline() -> str:
    """One row per model, for the README and the first page of results."""
    documents = {model: load_result("budget", f"{model}-cores") for model in MODELS}
    rows = []
    for model, document in documents.items():
        found = [row for row in document["result"]["rows"] if "planner" in row]
        rows.append(
            [
                f"{MODELS[model]} (FP32 {document['result']['fp32']:.1f})",
                ", ".join(f"{row['file_ratio']:.1f}x" for row in found),
                ", ".join(f"{row['top1']:.1f}" for row in found),
            ]
        )
    note = "1,000 unlabelled images, no training; top-1 on 2,000 validation images.\n"
    table = format_table(["model", "times smaller, bytes on disk", "top-1"], rows)
    return f"{table}\n{note}{format_source(*documents.values())}"


def tabulate_planners(study: str, case: str, first: str, places: tuple[int, int]) -> str:
    """One row per planner and ratio, with some decimal places of the ratio and of the divergence."""
    document = load_result(study, case)
    rows = [
        [
            row["name"],
            f"{row['file_ratio']:.{places[0]}f}",
            f"{row['top1']:.1f}",
            f"{row['kl']:.{places[1]}f}",
        ]
        for row in document["result"]["rows"]
    ]
    return f"{format_table([first, 'file ratio', 'top-1', 'KL, nats'], rows)}\n{format_source(document)}"


def tabulate_cores() -> str:
    """Both models at each ratio."""
    documents = {model: load_result("budget", f"{model}-cores") for model in MODELS}
    rows = [
        [
            f"{MODELS[model]} (FP32 {document['result']['fp32']:.1f})",
            f"{row['file_ratio']:.2f}",
            f"{row['top1']:.1f}",
            f"{row['agreement']:.1f}",
            f"{row['kl']:.4f}",
        ]
        for model, document in documents.items()
        for row in document["result"]["rows"]
    ]
    table = format_table(["model", "file ratio", "top-1", "agreement with FP32", "KL, nats"], rows)
    return f"{table}\n{format_source(*documents.values())}"


def tabulate_trellis() -> str:
    documents = {model: load_result("ablation", f"{model}-trellis") for model in MODELS}
    rows = [
        [
            MODELS[model],
            row["name"].removeprefix("everything, ").removeprefix("and "),
            f"{row['file_ratio']:.2f}",
            f"{row['top1']:.1f}",
            f"{row['kl']:.4f}",
        ]
        for model, document in documents.items()
        for row in document["result"]["rows"]
    ]
    table = format_table(["model", "codes", "file ratio", "top-1", "KL, nats"], rows)
    return f"{table}\n{format_source(*documents.values())}"


def tabulate_mirrored() -> str:
    documents = {model: load_result("budget", f"{model}-mirror") for model in MODELS}
    rows = [
        [MODELS[model], row["name"], f"{row['file_ratio']:.1f}", f"{row['kl']:.4f}", f"{row['seconds']:.0f}"]
        for model, document in documents.items()
        for row in document["result"]["rows"]
    ]
    table = format_table(["model", "128 images", "file ratio", "KL, nats", "seconds"], rows)
    return f"{table}\n{format_source(*documents.values())}"


TABLES = {
    "headline": tabulate_headline,
    "planned-resnet18": partial(tabulate, "resnet18"),
    "planned-mobilenet_v2": partial(tabulate, "mobilenet_v2"),
    "ablation": partial(tabulate_planners, "ablation", "resnet18", "ingredients", (2, 3)),
    "choices-resnet18": partial(tabulate_planners, "budget", "resnet18-choose", "setting", (1, 4)),
    "choices-mobilenet_v2": partial(tabulate_planners, "budget", "mobilenet_v2-choose", "setting", (1, 4)),
    "cores": tabulate_cores,
    "mirrored": tabulate_mirrored,
    "ridge": partial(tabulate_planners, "budget", "resnet18-ridge", "setting", (1, 4)),
    "trellis": tabulate_trellis,
    "trellis-few-images": partial(tabulate_planners, "budget", "mobilenet_v2-trellis", "codes", (1, 4)),
}
