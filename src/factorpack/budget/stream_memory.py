"""How much memory a streamed, calibrated run takes: from shapes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.budget.segment_gradients import STREAMED_SAMPLES
from factorpack.calibration.streaming import open_skeleton
from factorpack.calibration.walk import BORDER_BYTES
from factorpack.errors import PlanError
from factorpack.passes.cuts import largest_list
from factorpack.passes.resident import LIMIT_BYTES, bytes_at_once, weight_bytes
from factorpack.source import Source

LOGIT_BYTES = 32
"""Per logit of one text while sensitivities are measured: logits, probabilities, gradients, and their squares."""
ACTIVATION_BYTES = 16
"""Per output of a block's layers on one text: for the gradients, and in the moments of its inputs."""
MOMENT_COPIES = 10
"""Matrices of K x K floats while a weight of K inputs is planned, as measured: moments, ridge, factors."""
WEIGHT_COPIES = 11
"""Copies of a weight in FP32 while it is coded, as measured: adapted, latent, in steps, its codes."""
WRITTEN_BYTES = 14
"""Per code of the weight that is being encoded for the file, as measured."""


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """Estimated peaks, on top of Python and torch themselves."""

    samples: int
    length: int
    """Tokens per sample."""
    device_bytes: int
    """Without a GPU both are host memory."""
    host_bytes: int


def estimate_stream_memory(
    path: Path, source: Source, file_bytes: int, samples: int, length: int
) -> StreamMemory:
    """Memory to compress a folder block by block into a file of `file_bytes`, one sample of tokens at a time."""
    if samples < 1 or length < 1:
        raise PlanError(f"{samples} samples of {length} tokens, expected at least one of each")
    network = open_skeleton(path, source)
    blocks = [network.get_submodule(name) for name in largest_list(network)]
    border = length * _width(network) * next(network.parameters()).element_size()
    borders = 2 * samples * border
    coding = max(map(_coding_bytes, _weights(network)), default=0)
    device = 2 * _resident_bytes(network, blocks) + min(borders, BORDER_BYTES)
    device += max(coding, _backward_bytes(network, blocks, length))
    numels = [math.prod(shape) for shape in _weights(network)]
    coded = sum(numels) + file_bytes + WRITTEN_BYTES * max(numels, default=0)
    kept = min(samples, STREAMED_SAMPLES) * border * (len(blocks) + 1)
    host = max(borders - BORDER_BYTES, 0) + max(coded, kept)
    return StreamMemory(samples, length, int(device), int(host))


def _weights(network: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in network.parameters() if each.dim() > 1]


def _width(network: nn.Module) -> int:
    """Elements per token of what a block hands on."""
    config: Any = network.config
    return int(getattr(config, "hidden_size", 0)) or max(shape[1] for shape in _weights(network))


def _resident_bytes(network: nn.Module, blocks: list[nn.Module]) -> int:
    """Weights of one network on the device at a time, as `Resident` limits them."""
    return min(weight_bytes(network), max(LIMIT_BYTES, bytes_at_once(network, blocks)))


def _coding_bytes(shape: tuple[int, ...]) -> int:
    return 4 * (WEIGHT_COPIES * math.prod(shape) + MOMENT_COPIES * math.prod(shape[1:]) ** 2)


def _backward_bytes(network: nn.Module, blocks: list[nn.Module], length: int) -> int:
    head: Any = network.get_output_embeddings()  # type: ignore[operator]
    logits = 0 if head is None else LOGIT_BYTES * len(head.weight)
    outputs = [sum(shape[0] for shape in _weights(block)) for block in blocks]
    return length * max(logits, ACTIVATION_BYTES * max(outputs, default=0))
