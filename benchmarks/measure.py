"""Measurements shared by the studies: accuracy on images, seconds, memory, and the machine they are from."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import factorpack as fp
from benchmarks.data import Images, normalized


def machine() -> dict[str, Any]:
    """The machine that a measurement comes from."""
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    facts: dict[str, Any] = {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}
    facts["torch"] = torch.__version__
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def predictions(
    model: nn.Module, images: Tensor, batch: int = 50, prepare: Callable[[Tensor], Tensor] = normalized
) -> Tensor:
    """Logits of byte images, (n, classes), on the model's device."""
    device = next(model.parameters(), images).device
    with torch.inference_mode():
        chunks = [model(prepare(chunk.to(device))).float().cpu() for chunk in images.split(batch)]
    return torch.cat(chunks)


def top1(model: nn.Module, data: Images, batch: int = 50) -> float:
    """Percent of images whose class is correct."""
    images, labels = data
    return 100.0 * float((predictions(model, images, batch).argmax(1) == labels).float().mean())


def fidelity(logits: Tensor, reference: Tensor, labels: Tensor) -> dict[str, float]:
    """Top-1, agreement with the reference's choice (both percent) and mean KL divergence from it (nats)."""
    kl = nn.functional.kl_div(
        logits.log_softmax(1), reference.log_softmax(1), log_target=True, reduction="batchmean"
    )
    return {
        "top1": 100.0 * float((logits.argmax(1) == labels).float().mean()),
        "agreement": 100.0 * float((logits.argmax(1) == reference.argmax(1)).float().mean()),
        "kl": float(kl),
    }


def mean_divergence(net: nn.Module, other: nn.Module, batches: list[Any]) -> float:
    """Mean Kullback-Leibler divergence of another model's predictions from a model's own, in nats."""
    return divergence_from((log_probabilities(net, batch) for batch in batches), other, batches)


def divergence_from(expected: Iterable[Tensor], other: nn.Module, batches: list[Any]) -> float:
    """The same from the log-probabilities that a model has `expected` for each batch."""
    total, count = 0.0, 0
    for before, batch in zip(expected, batches, strict=True):
        total += float((before.exp() * (before - log_probabilities(other, batch))).sum())
        count += len(before)
    return total / count


def log_probabilities(net: nn.Module, batch: Any) -> Tensor:
    """Of every class for every prediction of a batch, (predictions, classes)."""
    with torch.inference_mode():
        output = net(**batch) if isinstance(batch, dict) else net(batch)
        logits: Tensor = getattr(output, "logits", output)
        return logits.flatten(0, -2).double().log_softmax(-1)


def reloaded(packed: fp.Packed, folder: str) -> fp.Packed:
    """A packed model written to a file in `folder` and opened from there: what is measured is a file."""
    path = Path(folder) / "packed.safetensors"
    fp.save(packed, path)
    return fp.load(path)


def seconds(
    work: Callable[[], object], repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median time of some calls, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        started = clock()
        work()
        times.append(clock() - started)
    return statistics.median(times)


def one_thread_clock() -> Callable[[], float]:
    """Processor time of this process where torch has one thread, so that other work on the machine is not in it."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def allocated_bytes(work: Callable[[], object]) -> int:
    """The most memory that torch holds at one time for some work on the CPU, by its own count of allocations."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


def reset_peak() -> int:
    """Forgets the peak so far (Linux) and returns the bytes resident now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most memory this process has had resident since `reset_peak`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
