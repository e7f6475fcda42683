"""Does the file fit the budget? Real files at many ratios, planned from the weights alone."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import factorpack as fp
from benchmarks.data import checkpoint
from benchmarks.formatting import format_source, format_table, load_result
from factorpack.budget.goals import budget_bytes
from factorpack.source import open_source


def run(checkpoints: list[str], ratios: list[float], with_curves: bool = False) -> dict[str, Any]:
    found = {name: _kept(name, ratios) for name in checkpoints}
    outcome: dict[str, Any] = {"rows": [row for rows, _ in found.values() for row in rows]}
    if with_curves:
        outcome["curves"] = {name: curves for name, (_, curves) in found.items()}
    return outcome


def _kept(name: str, ratios: list[float]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    path = checkpoint(name)
    source = open_source(path)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        curves = Path(folder) / "curves.json"
        for ratio in ratios:
            started = time.perf_counter()
            packed = fp.compress(path, ratio=ratio, curves=curves, progress=False)
            seconds = time.perf_counter() - started
            file = Path(folder) / "packed.safetensors"
            fp.save(packed, file)
            rows.append(
                {
                    "checkpoint": name,
                    "ratio": ratio,
                    "budget_bytes": budget_bytes(source, ratio),
                    "file_bytes": file.stat().st_size,
                    "seconds": round(seconds, 1),
                }
            )
            print(rows[-1], flush=True)
    return rows, {name: asdict(curve) for name, curve in packed.curves.items()}


def tabulate() -> str:
    document = load_result("kept", "weights")
    rows = [
        [
            row["checkpoint"].split(":")[0],
            f"{row['ratio']:.0f}",
            f"{row['budget_bytes']:,}",
            f"{row['file_bytes']:,}",
            f"{row['file_bytes'] / row['budget_bytes']:.2%}",
        ]
        for row in document["result"]["rows"]
    ]
    head = ["checkpoint", "ratio", "budget, bytes", "file, bytes", "share of the budget used"]
    return f"{format_table(head, rows)}\n{format_source(document)}"


TABLES = {"kept": tabulate}
