"""What `factorpack compress` says before it begins, and when it is done."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from factorpack.budget.goals import budget_bytes
from factorpack.budget.phases import coding_work
from factorpack.calibration.synthetic import Synthetic
from factorpack.packed import Packed
from factorpack.progress import say_seconds
from factorpack.report.text import human_bytes
from factorpack.source import Source
from factorpack.tune.models import default_device

if TYPE_CHECKING:
    from factorpack.commands.compress_request import CompressRequest

SECONDS_PER_WORK = 0.9e-6
"""Of one core, for a budget from the weights alone: 0.6 to 1.1 for ResNet18 and MobileNetV2."""
MOST_CORES = 4
"""More do not help a single weight."""


def introduce(request: CompressRequest, source: Source) -> Iterator[str]:
    """What was found, and what will be done with it."""
    numel = sum(entry.numel for entry in source.entries.values())
    held = sum(entry.numel * entry.dtype.itemsize for entry in source.entries.values())
    count = len(source.entries)
    tensors = f"{count} {'tensor' if count == 1 else 'tensors'}"
    yield f"{request.source}: {_millions(numel)} parameters in {tensors}, {human_bytes(held)}"
    yield f"{_goal(request, source)}, {_calibrated_on(request)}, {_where(request)}{_duration(request, source)}"


def _goal(request: CompressRequest, source: Source) -> str:
    if request.max_loss is not None:
        return f"the smallest file that diverges by {request.max_loss:g} nats at most"
    if request.has_budget:
        return f"into {human_bytes(budget_bytes(source, request.ratio, request.max_bytes))}"
    method = request.method.make()
    if method is not None:
        return f"by {method}"
    return "by the recipe's methods" if request.recipe else "by the default method"


def _calibrated_on(request: CompressRequest) -> str:
    if request.calibration is None:
        return "from the weights alone"
    if isinstance(request.calibration, Synthetic):
        return f"calibrated on {request.samples} inputs made from the model"
    return f"calibrated on up to {request.samples} inputs of {request.calibration}"


def _where(request: CompressRequest) -> str:
    if request.engine is not None:
        return "in worker processes"
    device = default_device() if request.calibration is not None else torch.device("cpu")
    threads = torch.get_num_threads()
    return "on a GPU" if device.type == "cuda" else f"on {threads} {'core' if threads == 1 else 'cores'}"


def _duration(request: CompressRequest, source: Source) -> str:
    """A rough time, where the weights alone decide it."""
    if not request.has_budget or request.engine is not None:
        return ""
    if request.calibration is not None:
        # Passes through the model decide it, and it has not run yet.
        return "" if default_device().type == "cuda" else "; minutes or more, and the bar says how many"
    work = sum(coding_work(entry.numel, False) for entry in source.entries.values() if len(entry.shape) > 1)
    seconds = SECONDS_PER_WORK * work / min(torch.get_num_threads(), MOST_CORES)
    return f"; about {say_seconds(_round(seconds))}"


def _round(seconds: float) -> float:
    """To one digit: it is no better than that."""
    return float(f"{max(seconds, 1.0):.0e}")


def conclude(request: CompressRequest, packed: Packed) -> Iterator[str]:
    """What the file is worth, and what to do next."""
    if packed.estimated_loss is not None:
        yield (
            f"estimated loss: {packed.estimated_loss:.3g} nats of divergence from the original's predictions"
        )
    yield f"next: {next_command(request, packed)}"


def next_command(request: CompressRequest, packed: Packed) -> str:
    words = ["factorpack", "verify", str(packed.path), "--against", str(request.source)]
    return shlex.join([*words, "--key", request.key] if request.key else words)


def _millions(count: int) -> str:
    return f"{count / 1e6:.3g} million" if count >= 1e5 else f"{count:,}"
