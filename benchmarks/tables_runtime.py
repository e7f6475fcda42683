"""The table of ways to run a packed file: latency, memory, load time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import markdown, result, source

CASES = {
    "resnet18": "ResNet18, planned",
    "mobilenet_v2": "MobileNetV2, planned",
    "resnet18-low-rank": "ResNet18, SVD of a quarter of the rank",
}


def modes() -> str:
    """A line for each file, mode and batch size."""
    lines, notes = [], ""
    for case, title in CASES.items():
        document = result("runtime", case)
        notes += source(document)
        lines += [[title, *_cells(row)] for row in document["result"]["rows"]]
    head = ["file", "batch", "mode", "ms", "of the original's", "resident, MB", "load, s", "layers"]
    return f"{markdown(head, lines)}\n{notes}"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["batch"]),
        row["mode"],
        f"{1e3 * row['seconds']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['resident_bytes'] / 1e6:.2f}",
        "-" if row["load_seconds"] is None else f"{row['load_seconds']:.2f}",
        ", ".join(f"{count} {mode}" for mode, count in sorted(row["layers"].items())) or "-",
    ]


def loading() -> str:
    """From a file to a model that can run, and what memory a weight takes while it is rebuilt."""
    lines = []
    for case, title in CASES.items():
        outcome = result("runtime", case)["result"]
        packed = next(row for row in outcome["rows"] if row["mode"] == "packed")["resident_bytes"]
        lines.append(
            [
                title,
                *(f"{outcome[name] / 1e6:.2f}" for name in ("fp32_bytes", "file_bytes")),
                *(f"{outcome[name]:.3f}" for name in ("fp32_load_s", "packed_load_s")),
                *(f"{outcome[name]:.2f}" for name in ("fp32_over_link_s", "packed_over_link_s")),
                *(
                    f"{count / 1e6:.2f}"
                    for count in (packed, outcome["largest_weight_bytes"], outcome["rebuild_peak_bytes"])
                ),
            ]
        )
    head = ["file", "FP32, MB", "packed, MB", "load FP32, s", "packed", "FP32 over 100 Mbit/s", "packed"]
    head += ["resident packed, MB", "largest weight, MB", "peak while rebuilding, MB"]
    return markdown(head, lines)


RUNTIME: dict[str, Callable[[], str]] = {"modes": modes, "loading": loading}
