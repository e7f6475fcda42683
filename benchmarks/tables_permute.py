"""The table of permuted channels: what k-means loses before and after."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import markdown, result, source

CASES = {
    "resnet18": "ResNet18",
    "mobilenet_v2-8": "MobileNetV2",
    "mobilenet_v2-4": "MobileNetV2",
}


def permuted() -> str:
    """A line for each model, tile, and whether a weight narrows; every number of a weight counts the same.

    Weights with no more tiles than codewords are left out: they lose nothing in any order.
    """
    lines, notes = [], ""
    for case, title in CASES.items():
        document = result("permute", case)
        notes += source(document)
        outcome = document["result"]
        lossy = [row for row in outcome["rows"] if row["error"][0] > 0]
        for kind in sorted({_kind(row) for row in lossy}):
            rows = [row for row in lossy if _kind(row) == kind]
            lines.append([title, *map(str, kind), *_cells(rows), f"{outcome['search_seconds']:.0f}"])
    head = ["model", "tile", "outputs", "weights", "log det", "permuted", "error", "permuted", "change"]
    head += ["of a weight", "by start", "search, s"]
    return f"{markdown(head, lines)}\n{notes}"


def _kind(row: dict[str, Any]) -> tuple[int, str]:
    outputs, inputs = row["shape"][:2]
    return row["tile"], "fewer than inputs" if outputs < inputs else "as many or more"


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    sizes = [math.prod(row["shape"]) for row in rows]

    def mean(key: str, place: int) -> float:
        return sum(size * row[key][place] for size, row in zip(sizes, rows, strict=True)) / sum(sizes)

    before, after = mean("error", 0), mean("error", 1)
    changes = sorted(row["error"][1] / row["error"][0] - 1 for row in rows)
    return [
        str(len(rows)),
        *(f"{mean('log_det_of_group', place):.3f}" for place in (0, 1)),
        f"{before:.2%}",
        f"{after:.2%}",
        f"{after / before - 1:+.1%}",
        f"{changes[0]:+.1%} to {changes[-1]:+.1%}",
        f"{max(mean('spread', 0), mean('spread', 1)) / before:.1%}",
    ]


PERMUTED: dict[str, Callable[[], str]] = {"permuted": permuted}
