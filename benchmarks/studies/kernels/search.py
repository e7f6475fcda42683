"""The fastest launches of a kernel on this GPU, and the batch at which rebuilding the weight overtakes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.kernels.checks import random_codes
from benchmarks.studies.kernels.timing import DEVICE, copies_of, graph_us
from factorpack.runtime.code_rows import pack_rows
from factorpack.runtime.multiply import multiply_reference
from factorpack.runtime.multiply_triton import LAUNCHES, Launch, multiply_rows

SEARCHED = ([(4096, 2048), (8192, 4096)], [(8192, 8192), (8192, 14336)])
"""Matrices of codes, small and large, that the search times."""
BUCKETS = {2: (1, (2, 8)), 4: (4, (4, 8)), 8: (8, (8,)), 16: (16, (8, 16)), 64: (64, (32, 64))}
"""Largest batch of a bucket -> the batch that is timed for it, and the sizes of `Launch.batch` tried."""


def search_launches(
    bits: int, candidates: list[Launch], deadline: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The best launches for small and for large matrices, for each batch size; used from then on."""
    found = []
    for place, shapes in enumerate(SEARCHED):
        weights = [copies_of(pack_rows(random_codes(bits, *shape), bits)) for shape in shapes]
        for size, (batch, sizes) in BUCKETS.items():
            inputs = [torch.randn(batch, shape[1], device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
            trials = []
            for launch in candidates:
                if launch.batch in sizes and time.perf_counter() < deadline:
                    trials += _trials(launch, bits, inputs, weights, say)
            if not trials:
                continue
            least = [min(times) for times in zip(*(trial["us"] for trial in trials), strict=True)]
            trials.sort(
                key=lambda each: math.prod(us / low for us, low in zip(each["us"], least, strict=True))
            )
            pair = list(LAUNCHES[bits][size])
            pair[place] = Launch(**trials[0]["launch"])
            LAUNCHES[bits][size] = (pair[0], pair[1])
            found.append(
                {"bits": bits, "batch": batch, "shapes": shapes, "least_us": least, "best": trials[:8]}
            )
            say(f"{bits} bits, batch {batch}: {trials[0]}, the best of {len(trials)}; least {least}")
    return found


def _trials(
    launch: Launch, bits: int, inputs: list[Tensor], weights: list[list[Tensor]], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Microseconds of a launch on some matrices, each cut into more and more pieces."""
    trials = []
    for programs in (1.0, 2.0, 4.0, 8.0) if launch.warps >= 4 else (1.0, 4.0, 8.0, 16.0):
        tried = Launch(**{**asdict(launch), "programs": programs})
        try:
            times = [
                graph_us([partial(multiply_rows, x, w, bits, None, tried) for w in copies], 5)
                for x, copies in zip(inputs, weights, strict=True)
            ]
        except Exception as error:
            say(f"{tried}: {type(error).__name__}: {error}"[:200])
            break
        trials.append({"launch": asdict(tried), "us": times})
    return trials


def time_crossover(bits: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Where rebuilding the weight overtakes the kernel as batches grow."""
    rows, columns = SEARCHED[1][-1]
    weights = copies_of(pack_rows(random_codes(bits, rows, columns), bits))
    found = []
    for batch in (64, 128, 256, 512, 1024):
        values = torch.randn(batch, columns, device=DEVICE, dtype=torch.bfloat16)
        row: dict[str, Any] = {"bits": bits, "batch": batch}
        ways = {"kernel_us": multiply_rows, "rebuilt_us": multiply_reference}
        try:
            for name, way in ways.items():
                row[name] = graph_us([partial(way, values, w, bits, None) for w in weights], 5)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        say(f"crossover {row}")
        found.append(row)
    return found
