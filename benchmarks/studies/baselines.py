"""What each method makes of trained weights alone: bytes of a real file, error in the weights, seconds."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

import factorpack as fp
from benchmarks.data import checkpoint
from benchmarks.measure import reloaded
from factorpack.methods import METHODS, from_fields


def run(model: str, methods: list[dict[str, Any]]) -> dict[str, Any]:
    source = checkpoint(model)
    original = load_file(source)
    return {"rows": [_row(source, original, fields) for fields in methods]}


def _row(source: Path, original: dict[str, Tensor], fields: dict[str, Any]) -> dict[str, Any]:
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
            "weight_error": weight_error(packed.state_dict(), original),
            "compress_s": round(compressed - started, 2),
            "save_s": round(saved - compressed, 2),
        }
    print(row, flush=True)
    return row


def weight_error(found: dict[str, Tensor], original: dict[str, Tensor]) -> float:
    """||W' - W|| / ||W|| over all weights of two dimensions or more together."""
    weights = {name: weight.double() for name, weight in original.items() if weight.dim() > 1}
    lost = sum(float((found[name].double() - weight).square().sum()) for name, weight in weights.items())
    return float((lost / sum(float(weight.square().sum()) for weight in weights.values())) ** 0.5)
