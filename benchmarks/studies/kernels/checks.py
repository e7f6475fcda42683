"""Every kernel against FP64: the launches in use, and those that a search will try."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.kernels.timing import DEVICE
from factorpack.quantize.uniform import code_range
from factorpack.runtime.code_rows import fields, pack_rows
from factorpack.runtime.multiply_triton import LAUNCHES, Launch, multiply_rows

TAILS = [(256, 4096), (1000, 3000), (33, 515), (257, 4112), (1, 1)]
"""Rows and columns of the checks: whole tiles, and tails of every kind."""
CHECKED_BATCHES = [1, 3, 7, 16, 17, 64]
MOST_ROOM = 160 << 10
"""Bytes of shared memory that a launch may use."""
MOST_ERROR = 2.0**-16
"""Error of a sum relative to the sum of its terms' sizes, apart from rounding the output.

One wrong code would give more."""


def run_checks(checks: list[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    """The outcome of every check, some at a time in processes of their own."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_checked, case) for case in checks]
        return [_outcome(future, case) for future, case in zip(running, checks, strict=True)]


def list_checks() -> list[dict[str, Any]]:
    """Cases of the launches in use: widths, types, tails, batches, with and without scales."""
    cases: list[dict[str, Any]] = []
    for width, dtype, batch, shape in product(LAUNCHES, ("bfloat16", "float16"), CHECKED_BATCHES, TAILS):
        if dtype == "bfloat16" or shape in TAILS[:3]:
            scales = len(cases) % 3
            cases.append({"bits": width, "shape": shape, "batch": batch, "dtype": dtype, "scales": scales})
    return cases


def list_candidates(bits: int) -> Iterator[Launch]:
    """Launches worth trying: rows, warps, and those that work side by side."""
    alone = [(64, 4, 1), (128, 4, 1), (32, 2, 1)]
    beside = [(16, 4, 4)]
    if bits in (3, 4):
        alone += [(16, 1, 1), (32, 1, 1), (64, 2, 1)]
        beside += [(16, 2, 2), (32, 4, 4), (16, 8, 8)]
    few, many = {2: (32, 64), 3: (32, 64), 4: (64, 128), 8: (128, 256)}[bits]
    cell_bytes = {3: 6, 8: 1}.get(bits, 2)
    for (rows, warps, side), batch in product([*alone, *beside], (2, 4, 8, 16, 32, 64)):
        for cells, stages in ((few, 3), (few, 2)) if batch > 16 else ((few, 4), (many, 3)):
            room = stages * cells * side * (rows * cell_bytes + 2 * batch * fields(bits))
            if room <= MOST_ROOM and rows * batch * side <= 2048 * warps and (side == 1 or batch <= 16):
                yield Launch(rows, batch, cells, warps, stages, 4, side)


def _outcome(future: Future[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """What a check gave, or that its process died."""
    try:
        return future.result()
    except Exception as error:
        return {**case, "error": None, "fault": f"{type(error).__name__}: {error}"[:400]}


def _checked(case: dict[str, Any]) -> dict[str, Any]:
    """One product against FP64, in a process of its own pool: a compiled kernel stays in triton's cache."""
    try:
        launch = Launch(**case["launch"]) if "launch" in case else None
        bits, dtype = case["bits"], getattr(torch, case.get("dtype", "bfloat16"))
        batch = case.get("batch", launch.batch if launch else 1)
        rows, columns = case.get("shape", (256, 2 * fields(bits) * (launch.step if launch else 64)))
        torch.manual_seed(rows + columns + batch + bits)
        codes = random_codes(bits, rows, columns)
        inputs = torch.randn(batch, columns, device=DEVICE).to(dtype)
        scale = [None, torch.rand(rows, device=DEVICE), torch.rand(1, device=DEVICE).half()][
            case.get("scales", 0)
        ]
        poison = torch.full((batch, rows), math.nan, dtype=dtype, device=DEVICE)
        del poison  # an output that is not written is likely to hold it
        found = multiply_rows(inputs, pack_rows(codes, bits), bits, scale, launch).double()
        factor = 1.0 if scale is None else scale.double()
        expected = inputs.double() @ codes.double().T * factor
        terms = inputs.double().abs() @ codes.double().abs().T * factor
        rounding = torch.finfo(dtype).eps * expected.abs()
        error = float((((found - expected).abs() - rounding) / terms.clamp_min(1e-30)).max())
        fault = "" if error <= MOST_ERROR else f"error {error:.3e}, allowed is {MOST_ERROR:.1e}"
        return {**case, "error": error, "fault": fault}
    except Exception as error:
        return {**case, "error": None, "fault": f"{type(error).__name__}: {error}"[:400]}


def random_codes(bits: int, *shape: int) -> Tensor:
    low, high = code_range(bits)
    return torch.randint(low, high + 1, shape, dtype=torch.int8, device=DEVICE)
