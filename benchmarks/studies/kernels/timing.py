"""Microseconds of calls on a GPU: captured as a graph, and as a program makes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

DEVICE = "cuda"
ROTATED_BYTES = 256 << 20
"""Weights that a timing goes through before it uses one again: several times what the cache holds."""
REPLAYS = 11


def copy_count(size: int) -> int:
    return max(math.ceil(ROTATED_BYTES / size), 4)


def copies_of(tensor: Tensor) -> list[Tensor]:
    return [tensor, *(tensor.clone() for _ in range(copy_count(tensor.nbytes) - 1))]


def graph_us(calls: list[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median microseconds per call: all calls captured as one graph, which is replayed."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    times = _event_ms(graph.replay, replays)
    return 1e3 * statistics.median(times) / len(calls)


def eager_us(calls: list[Callable[[], object]], replays: int = 5) -> float:
    """Median microseconds per call in a program without graphs, one call after the other."""

    def work() -> None:
        for call in calls[:16]:
            call()

    work()
    return 1e3 * statistics.median(_event_ms(work, replays)) / len(calls[:16])


def _event_ms(work: Callable[[], object], replays: int) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)
    ]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def copy_bytes_per_s() -> float:
    """Read and written by a large copy on the device."""
    source = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / (1e-3 * statistics.median(_event_ms(lambda: target.copy_(source), REPLAYS)))
