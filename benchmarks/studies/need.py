"""The memory a worker needs: the peak of coding and writing one weight, in bytes per element, by method."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.formatting import format_settings, format_source, format_table, load_result
from factorpack.budget.candidates import choose_methods, curves_of
from factorpack.budget.planner import Planner
from factorpack.engine import Local, Task
from factorpack.format.packed_file import write_packed
from factorpack.methods import METHODS, from_fields
from factorpack.weight import Weight


def run(rows: int, columns: int, methods: list[dict[str, Any]]) -> dict[str, Any]:
    """Each in a worker of its own; the last is planning a weight for a budget."""
    return {"rows": [_measured(fields, rows, columns) for fields in [*methods, {"method": "planned"}]]}


def _measured(fields: dict[str, Any], rows: int, columns: int) -> dict[str, Any]:
    # The larger statement runs first: an interpreter warmed by a small weight, then the one that counts.
    tasks = [
        Task("start", code, (fields, 256, 256), memory_bytes=1),
        Task("weight", code, (fields, rows, columns)),
    ]
    start, weight = (outcome for outcome in Local(1).run(tasks))
    above = (weight.peak_bytes - start.peak_bytes) / (rows * columns)
    return {
        "method": fields,
        "start_bytes": start.peak_bytes,
        "bytes_a_number": round(above, 1),
        "cpu_s": round(weight.cpu_seconds, 2),
    }


def code(fields: dict[str, Any], rows: int, columns: int) -> None:
    """A worker's task: a BF16 weight, coded and written, or planned."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    if fields["method"] == "planned":
        weights = [Weight(weight)]
        curves_of(weights, choose_methods(weights, Planner(trellis=0), 3.0), 3.0)
        return
    with tempfile.TemporaryDirectory() as folder:
        encoded = from_fields(METHODS, fields).encode(Weight(weight))
        write_packed(Path(folder) / "part", [("weight", encoded)], {})


def tabulate() -> str:
    document = load_result("need", "methods")
    rows = [
        [format_settings(row["method"]), f"{row['bytes_a_number']:.0f}", f"{row['cpu_s']:.1f}"]
        for row in document["result"]["rows"]
    ]
    return f"{format_table(['method', 'bytes per element', 'CPU seconds'], rows)}\n{format_source(document)}"


TABLES = {"needed": tabulate}
