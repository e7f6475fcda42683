"""ONNX files of packed models: their bytes, how close their logits are to torch's, and what they cost to run."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import imagenet_val, normalized, pretrained, shuffled
from benchmarks.formatting import MODELS, format_source, format_table, load_result
from benchmarks.measure import seconds
from factorpack.methods import METHODS, from_fields

ROUNDS = 7
"""Every file runs once per round, so that other work on the machine affects all of them alike."""


def run(model: str, ratio: float, method: dict[str, Any], images: int) -> dict[str, Any]:
    net = pretrained(model)
    inputs = normalized(shuffled(imagenet_val())[0][:images])
    ways = {
        "FP32": fp.compress(net, exclude=["*"], progress=False),
        "planned": fp.compress(net, ratio=ratio, progress=False),
        "method": fp.compress(net, from_fields(METHODS, method), progress=False),
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.onnx" for name in ways}
        found = {name: written(packed, net, inputs, paths[name]) for name, packed in ways.items()}
        for label, optimised in (("answer_s", True), ("answer_unfolded_s", False)):
            running = {name: session(path, optimised) for name, path in paths.items()}
            for name, taken in run_seconds(running, inputs).items():
                found[name][label] = taken
    return found


def written(packed: fp.Packed, net: nn.Module, inputs: Tensor, path: Path) -> dict[str, Any]:
    """Writes both files of a packed model: their bytes, and how far the ONNX file's logits are off."""
    packed_path = path.with_suffix(".safetensors")
    fp.save(packed, packed_path)
    made = fp.onnx.export(packed, net, inputs, path)
    with torch.no_grad():
        expected = packed.load_into(copy.deepcopy(net))(inputs)
    return {
        "file_bytes": packed_path.stat().st_size,
        "fixed_width_bytes": sum(sum(line.fixed_bits.values()) for line in packed.size().tensors) // 8,
        "onnx_bytes": made.bytes,
        "largest_logit": expected.abs().max().item(),
        "largest_difference": largest_difference(path, inputs, expected, optimised=True),
        "largest_difference_unfolded": largest_difference(path, inputs, expected, optimised=False),
        "load_s": seconds(lambda: session(path)),
    }


def session(path: Path, optimised: bool = True) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def largest_difference(path: Path, inputs: Tensor, expected: Tensor, optimised: bool) -> float:
    return float(np.abs(_logits(session(path, optimised), inputs) - expected.numpy()).max())


def run_seconds(running: dict[str, onnxruntime.InferenceSession], inputs: Tensor) -> dict[str, float]:
    """The median of some rounds."""
    taken: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name, one in running.items():
            started = time.perf_counter()
            _logits(one, inputs)
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def _logits(running: onnxruntime.InferenceSession, inputs: Tensor) -> np.ndarray:
    logits: np.ndarray = running.run(None, {running.get_inputs()[0].name: inputs.numpy()})[0]
    return logits


def tabulate() -> str:
    documents = {model: load_result("onnx", model) for model in MODELS}
    columns = {
        f"{MODELS[model]}, {words}": document["result"][way]
        for model, document in documents.items()
        for way, words in WAYS.items()
    }
    rows = [[label, *(cell(each) for each in columns.values())] for label, cell in ROWS.items()]
    return f"{format_table(['', *columns], rows)}\n{format_source(*documents.values())}"


WAYS = {"FP32": "FP32", "planned": "`ratio=12`", "method": "`QSPCA(rank=128, latent_bits=3)`"}
ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    ".onnx, MB": lambda r: f"{r['onnx_bytes'] / 1e6:.2f}",
    "packed file, MB": lambda r: f"{r['file_bytes'] / 1e6:.2f}",
    "codes at one width per tensor, MB": lambda r: f"{r['fixed_width_bytes'] / 1e6:.2f}",
    "largest difference from torch's logits": lambda r: f"{r['largest_difference']:.1e}",
    "... with nothing folded": lambda r: f"{r['largest_difference_unfolded']:.1e}",
    "largest logit": lambda r: f"{r['largest_logit']:.1f}",
    "opening a session, s": lambda r: f"{r['load_s']:.2f}",
    "16 images, s": lambda r: f"{r['answer_s']:.2f}",
    "... with nothing folded, s": lambda r: f"{r['answer_unfolded_s']:.2f}",
}
TABLES = {"exported": tabulate}
