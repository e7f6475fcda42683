"""What each method makes of trained weights alone: bytes of a real file, error in the weights, seconds."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import factorpack as fp
from benchmarks.data import checkpoint
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
