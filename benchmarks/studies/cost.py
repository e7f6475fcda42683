"""What planning into a budget costs: seconds and memory, with and without calibration data, as models grow."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from torch import nn

import factorpack as fp
from benchmarks.data import imagenet_train, normalized, pretrained, shuffled
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.measure import peak_bytes, reloaded, reset_peak
from benchmarks.training import device


def run(
    ratio: float, model: str = "", samples: int = 0, widths: list[int] | None = None, repeats: int = 1
) -> dict[str, Any]:
    """One pretrained model, calibrated on `samples` images; or random multilayer perceptrons of some widths."""
    if widths:
        return {"rows": [_timed(_perceptron(width), ratio, None) for width in widths]}
    net = pretrained(model).to(device())
    batches = None
    if samples:
        images = shuffled(imagenet_train())[0][:samples]
        batches = [normalized(batch.to(device())) for batch in images.split(32)]
    return {"rows": [_timed(net, ratio, batches, samples) for _ in range(repeats)]}


def _timed(
    net: nn.Module, ratio: float, batches: list[torch.Tensor] | None, samples: int = 0
) -> dict[str, Any]:
    before = reset_peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    planner = fp.Planner(samples=max(samples, 1))
    started = time.perf_counter()
    packed = fp.compress(net, ratio=ratio, calibration=batches, planner=planner, progress=False)
    seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        report = reloaded(packed, folder).size()
    row = {
        "parameters": sum(value.numel() for value in net.state_dict().values()),
        "samples": samples,
        "seconds": round(seconds, 2),
        "peak_bytes": peak_bytes() - before,
        "file_ratio": report.file_ratio,
    }
    if torch.cuda.is_available():
        row["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def _perceptron(width: int) -> nn.Module:
    """Three square layers of random weights: only their number matters here."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def tabulate() -> str:
    documents = {case: load_result("cost", case) for case in CASES}
    rows = []
    for case, document in documents.items():
        machine, found = document["machine"], document["result"]["rows"]
        where = "GPU" if "gpu" in machine else f"{machine['cores']} cores"
        # The first of several calls on a GPU compiles kernels.
        for row in found if case == "growth" else found[-1:]:
            memory = row.get("gpu_peak_bytes", row["peak_bytes"])
            counts = [f"{row['parameters'] / 1e6:.1f}", f"{row['seconds']:.0f}", f"{memory / 1e6:.0f}"]
            rows.append([CASES[case], where, *counts])
    head = ["model", "on", "million parameters", "seconds", "peak memory above the start, MB"]
    return f"{format_table(head, rows)}\n{format_source(*documents.values())}"


CASES = {
    "resnet18-gpu": "ResNet18, 256 images",
    "resnet18-cpu": "ResNet18, 256 images",
    "resnet18-weights": "ResNet18, weights alone",
    "growth": "linear layers, weights alone",
}
TABLES = {"cost": tabulate}
