"""ONNX files of packed models: their bytes, how close they answer to torch, and what they cost to run."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import imagenet_val, normalized, pretrained, shuffled
from benchmarks.measure import seconds
from factorpack.methods import METHODS, from_fields

ROUNDS = 7
"""Every file answers once a round: what else the machine does then meets all of them alike."""


def run(model: str, ratio: float, method: dict[str, Any], pictures: int) -> dict[str, Any]:
    net = pretrained(model)
    inputs = normalized(shuffled(imagenet_val())[0][:pictures])
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
            for name, taken in answer_seconds(running, inputs).items():
                found[name][label] = taken
    return found


def written(packed: fp.Packed, net: nn.Module, inputs: Tensor, path: Path) -> dict[str, Any]:
    """Writes both files of a packed model: their bytes, and how far the ONNX file's answers are off."""
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
    return float(np.abs(_answer(session(path, optimised), inputs) - expected.numpy()).max())


def answer_seconds(running: dict[str, onnxruntime.InferenceSession], inputs: Tensor) -> dict[str, float]:
    """The median of some rounds."""
    taken: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name, one in running.items():
            started = time.perf_counter()
            _answer(one, inputs)
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def _answer(running: onnxruntime.InferenceSession, inputs: Tensor) -> np.ndarray:
    logits: np.ndarray = running.run(None, {running.get_inputs()[0].name: inputs.numpy()})[0]
    return logits
