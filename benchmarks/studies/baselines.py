"""Each method on trained weights alone: bytes of a real file, error of the weights, seconds."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import factorpack as fp
from benchmarks.data import checkpoint
from benchmarks.formatting import format_settings, format_source, format_table, load_result
from benchmarks.measure import reloaded
from factorpack.comparison.grid import weight_error
from factorpack.methods import METHODS, from_fields


def run(model: str, methods: list[dict[str, Any]]) -> dict[str, Any]:
    source = checkpoint(model)
    return {"rows": [_row(source, fields) for fields in methods]}


def _row(source: Path, fields: dict[str, Any]) -> dict[str, Any]:
    method = from_fields(METHODS, fields)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        packed = fp.compress(source, method, progress=False)
        compressed = time.perf_counter()
        packed = reloaded(packed, folder)
        saved = time.perf_counter()
        report = packed.size()
        row = {
            "method": fields,
            "file_bytes": report.file_bytes,
            "file_ratio": report.file_ratio,
            "paper_ratio": report.paper_ratio,
            "weight_error": weight_error(source, packed) ** 0.5,
            "compress_s": round(compressed - started, 2),
            "save_s": round(saved - compressed, 2),
        }
    print(row, flush=True)
    return row


def tabulate() -> str:
    document = load_result("baselines", "resnet18")
    rows = [
        [
            format_settings(row["method"]),
            f"{row['file_bytes'] / 1e6:.2f}",
            f"{row['file_ratio']:.2f}",
            f"{row['paper_ratio']:.2f}",
            f"{row['weight_error']:.3f}",
            f"{row['compress_s'] + row['save_s']:.1f}",
        ]
        for row in document["result"]["rows"]
    ]
    head = ["method", "file, MB", "file ratio", "fixed-width ratio", "weight error", "seconds"]
    return f"{format_table(head, rows)}\n{format_source(document)}"


TABLES = {"baselines": tabulate}
