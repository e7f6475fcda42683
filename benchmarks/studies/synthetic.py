"""What calibration inputs made from the model itself are worth, between the weights alone and real inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import log
from typing import Any

import torch
from torch import nn

import factorpack as fp
from benchmarks.data import imagenet_train, imagenet_val, normalized, pretrained, shuffled
from benchmarks.formatting import MODELS, format_source, format_table, is_stored, load_result
from benchmarks.llamas import sampled_tokens, stories15m, story_tokens
from benchmarks.measure import top1
from benchmarks.studies.timing import measure_divergence, warm_up
from benchmarks.training import device
from factorpack.calibration.synthetic import Synthetic, make_batches

Row = dict[str, Any]
HELD = 200
"""Training images that nothing is calibrated on."""
HELD_TEXTS = 16
BATCH = 50


def run(
    model: str, ratios: list[float], real: int, made: list[int], length: int = 0, settings: Row | None = None
) -> Row:
    """Every ratio from the weights alone, from `real` inputs, and from each number of `made` ones.

    The divergence is measured on training images, or on texts, that nothing is calibrated on. `settings` are
    those of `Synthetic`; `length` is the tokens of a text.
    """
    warm_up()
    if model == "stories15m":
        return _run_texts(ratios, real, made, length, settings or {})
    return _run_images(model, ratios, real, made, settings or {})


def _run_images(model: str, ratios: list[float], real: int, made: list[int], settings: Row) -> Row:
    net = pretrained(model).to(device())
    images = shuffled(imagenet_train())[0]
    if real > len(images) - HELD:
        raise ValueError(f"{real} of {len(images)} images leave fewer than {HELD} to measure on")
    given = [normalized(each.to(device())) for each in images[:real].split(BATCH)]
    held_out = [normalized(each.to(device())) for each in images[-HELD:].split(BATCH)]

    def measure(packed: fp.Packed) -> Row:
        other = packed.load_into(pretrained(model)).to(device()).eval()
        return {"divergence": measure_divergence(net, packed, held_out), "top1": top1(other, imagenet_val())}

    rows = _compress_all(net, ratios, real, given, _make_all(net, made, Synthetic(**settings)), measure)
    return {"fp32": top1(net, imagenet_val()), "rows": rows}


def _run_texts(ratios: list[float], real: int, made: list[int], length: int, settings: Row) -> Row:
    """Real texts are stories like those that the model was trained on."""
    net = stories15m()
    stories = story_tokens(real + HELD_TEXTS, length).to(device())
    given = [{"input_ids": each} for each in stories[:real].split(8)]
    # Divergence is defined on what the model writes; on stories it is measured as well.
    written = sampled_tokens(net, HELD_TEXTS, length, seed=1)

    def measure(packed: fp.Packed) -> Row:
        own, others = (
            measure_divergence(net, packed, [{"input_ids": each} for each in texts.split(1)])
            for texts in (written, stories[real:])
        )
        return {"divergence": own, "on_stories": others}

    texts = _make_all(net, made, Synthetic(length=length, **settings))
    return {"rows": _compress_all(net, ratios, real, given, texts, measure)}


Made = dict[int, tuple[list[Any], float]]
"""Batches of so many inputs, and the seconds they took."""


def _make_all(net: nn.Module, counts: list[int], settings: Synthetic) -> Made:
    found: Made = {}
    for count in counts:
        started = time.perf_counter()
        batches = make_batches(net, settings, count, progress=False)
        _wait()
        found[count] = batches, round(time.perf_counter() - started, 1)
    return found


def _compress_all(
    net: nn.Module,
    ratios: list[float],
    real: int,
    given: list[Any],
    made: Made,
    measure: Callable[[fp.Packed], Row],
) -> list[Row]:
    """One row per ratio and source of inputs, with how far it goes from the weights alone to real inputs."""
    sources: list[tuple[str, int, list[Any] | None, float]] = [
        ("weights alone", 0, None, 0.0),
        ("real", real, given, 0.0),
        *(("synthetic", count, batches, seconds) for count, (batches, seconds) in made.items()),
    ]
    rows: list[Row] = []
    for ratio in ratios:
        found: list[Row] = []
        for name, count, batches, making in sources:
            planner, started = fp.Planner(samples=max(count, 1)), time.perf_counter()
            packed = fp.compress(net, ratio=ratio, calibration=batches, planner=planner, progress=False)
            _wait()
            seconds = {"making": making, "compressing": round(time.perf_counter() - started, 1)}
            found.append({"ratio": ratio, "inputs": name, "count": count, **seconds, **measure(packed)})
        alone, full = (row["divergence"] for row in found[:2])
        rows += [{**row, "share": log(alone / row["divergence"]) / log(alone / full)} for row in found]
    return rows


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tabulate() -> str:
    """One row per stored measurement."""
    documents = {case: load_result("synthetic", case) for case in CASES if is_stored("synthetic", case)}
    rows = [_cells(case, row) for case, document in documents.items() for row in document["result"]["rows"]]
    head = ["model", "times smaller", "calibrated on", "KL, nats", "of the way", "top-1", "KL on stories"]
    head += ["making, s", "compressing, s"]
    return f"{format_table(head, rows)}\n{format_source(*documents.values())}" if documents else NOTHING


def _cells(case: str, row: Row) -> list[str]:
    return [
        CASES[case],
        f"{row['ratio']:.4g}",
        f"{row['count']:,} {row['inputs']}" if row["count"] else row["inputs"],
        f"{row['divergence']:.4f}",
        f"{row['share']:.0%}",
        f"{row['top1']:.1f}" if "top1" in row else "",
        f"{row['on_stories']:.4f}" if "on_stories" in row else "",
        f"{row['making']:.1f}" if row["making"] else "",
        f"{row['compressing']:.1f}",
    ]


NOTHING = "No result is stored yet.\n"
CASES = {**MODELS, "stories15m": "Llama, 15 million weights"}
TABLES = {"synthetic": tabulate}
