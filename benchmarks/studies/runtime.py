"""A packed file in each mode it can run in: latency beside the FP32 model, resident and peak memory, load time."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import factorpack as fp
from benchmarks.data import checkpoint, pretrained
from benchmarks.first_prediction import time_first_predictions
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.measure import allocated_bytes, one_thread_clock, seconds
from factorpack.commands.bench import measure_modes
from factorpack.methods import METHODS, from_fields
from factorpack.runtime.apply import MODES
from factorpack.runtime.packed_layers import PackedLayer

LINK_BITS_PER_S = 100e6


def run(
    model: str,
    batches: list[int],
    slack: float,
    rounds: list[int],
    threads: list[int],
    repeats: int,
    ratio: float | None = None,
    method: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Packed from the weights alone, to `ratio` or by `method`; `slack` is for the mode auto.

    Each batch size has its rounds. First predictions are timed in `repeats` processes for each of `threads`.
    """
    source = checkpoint(model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "packed.safetensors"
        chosen = from_fields(METHODS, method) if method else None
        fp.save(fp.compress(pretrained(model), chosen, ratio=ratio, progress=False), file)
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(batch, 3, 224, 224, generator=generator) for batch in batches]
        net = pretrained(model)
        clock = one_thread_clock()
        fp32_load = seconds(lambda: net.load_state_dict(load_file(source)), clock=clock)
        packed_load = seconds(lambda: fp.load(file).load_into(net), clock=clock)
        largest = max(4 * encoded.numel for encoded in fp.load(file).values())
        return {
            "threads": torch.get_num_threads(),
            "clock": clock.__name__,
            "fp32_bytes": source.stat().st_size,
            "file_bytes": file.stat().st_size,
            "largest_weight_bytes": largest,
            "fp32_load_s": fp32_load,
            "packed_load_s": packed_load,
            "fp32_over_link_s": 8 * source.stat().st_size / LINK_BITS_PER_S + fp32_load,
            "packed_over_link_s": 8 * file.stat().st_size / LINK_BITS_PER_S + packed_load,
            "first": time_first_predictions(model, file, ("dense", "packed"), threads, repeats),
            "rows": [
                asdict(row)
                for batch, count in zip(inputs, rounds, strict=True)
                for row in measure_modes(
                    file,
                    lambda: pretrained(model),
                    [batch],
                    MODES,
                    slack,
                    rounds=count,
                    twin=True,
                    clock=clock,
                )
            ],
            "rebuild_peak_bytes": _rebuild_peak(fp.load(file), pretrained(model)),
        }


def _rebuild_peak(packed: fp.Packed, net: nn.Module) -> int:
    """The most memory that rebuilding any one weight takes, itself included, by torch's count of allocations."""
    layers = [
        module for module in packed.apply(net, "packed").model.modules() if isinstance(module, PackedLayer)
    ]
    return max(allocated_bytes(layer.packed) for layer in layers)


def tabulate_modes() -> str:
    """One row per file, mode and batch size."""
    documents = {case: load_result("runtime", case) for case in CASES}
    rows = [
        [CASES[case], *_mode_cells(row)]
        for case, document in documents.items()
        for row in document["result"]["rows"]
    ]
    head = ["file", "batch", "mode", "ms", "times the original's", "resident, MB", "load, s", "layers"]
    return f"{format_table(head, rows)}\n{format_source(*documents.values())}"


def _mode_cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["batch"]),
        row["mode"],
        f"{1e3 * row['seconds']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['resident_bytes'] / 1e6:.2f}",
        "-" if row["load_seconds"] is None else f"{row['load_seconds']:.2f}",
        ", ".join(f"{count} {mode}" for mode, count in sorted(row["layers"].items())) or "-",
    ]


def tabulate_first() -> str:
    """From a cached file to the first prediction, in a process of its own, beside FP32."""
    rows = []
    for case, title in CASES.items():
        found = {(row["how"], row["threads"]): row for row in load_result("runtime", case)["result"]["first"]}
        for threads in sorted({count for _, count in found}):
            fp32, dense, packed = (found[how, threads] for how in ("fp32", "dense", "packed"))
            times = [
                f"{1e3 * row[part]:.0f}" for row in (fp32, dense, packed) for part in ("load_s", "total_s")
            ]
            ratios = [f"{row['total_s'] / fp32['total_s']:.1f}" for row in (dense, packed)]
            rows.append([title, str(threads), *times, *ratios])
    head = ["file", "threads", "FP32: load, ms", "to the first prediction"]
    head += ["dense: load", "to the first prediction", "packed: load", "to the first prediction"]
    head += ["dense, times FP32", "packed, times FP32"]
    return format_table(head, rows)


def tabulate_loading() -> str:
    """From a file to a model that can run, and the memory that a weight takes while it is rebuilt."""
    rows = []
    for case, title in CASES.items():
        outcome = load_result("runtime", case)["result"]
        packed = next(row for row in outcome["rows"] if row["mode"] == "packed")["resident_bytes"]
        largest, peak = outcome["largest_weight_bytes"], outcome["rebuild_peak_bytes"]
        rows.append(
            [
                title,
                *(f"{outcome[name] / 1e6:.2f}" for name in ("fp32_bytes", "file_bytes")),
                *(f"{outcome[name]:.3f}" for name in ("fp32_load_s", "packed_load_s")),
                *(f"{outcome[name]:.2f}" for name in ("fp32_over_link_s", "packed_over_link_s")),
                *(f"{count / 1e6:.2f}" for count in (packed, largest, peak)),
                f"{100 * ((packed + peak) / (packed + largest) - 1):.0f} %",
            ]
        )
    head = ["file", "FP32, MB", "packed, MB", "load FP32, s", "packed", "FP32 over 100 Mbit/s, s", "packed"]
    head += ["resident packed, MB", "largest weight, MB", "peak while rebuilding, MB"]
    head += ["above resident and largest"]
    return format_table(head, rows)


CASES = {
    "resnet18": "ResNet18, planned",
    "mobilenet_v2": "MobileNetV2, planned",
    "resnet18-low-rank": "ResNet18, SVD of a quarter of the rank",
}
TABLES = {"modes": tabulate_modes, "loading": tabulate_loading, "first": tabulate_first}
