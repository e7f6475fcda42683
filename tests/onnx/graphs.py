"""ONNX graphs run in onnxruntime: as it optimises by itself, and node by node as they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN, FOLDED = False, True


def run(model: bytes, inputs: Mapping[str, Tensor], optimised: bool) -> Tensor:
    """The first output."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    given: dict[str, Any] = {name: value.numpy() for name, value in inputs.items()}
    return torch.from_numpy(np.array(session.run(None, given)[0]))
