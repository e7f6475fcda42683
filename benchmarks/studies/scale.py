"""Large checkpoints: time and memory of compressing synthetic ones, Llama-shaped, BF16 and sharded, over an engine."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import factorpack as fp
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.llamas import Shape, write_sharded
from benchmarks.measure import peak_bytes, reset_peak
from factorpack.decoding import decode
from factorpack.engine import Local, Outcome, Task
from factorpack.methods import METHODS, from_fields
from factorpack.planning.rules import Rules
from factorpack.source import open_source

CHECKED = 3
"""Tensors that are coded again in this process, to check that the file holds the same."""


def run(
    hidden: int,
    intermediate: int,
    layers: int,
    vocabulary: int,
    workers: int,
    method: dict[str, Any] | None = None,
    ratio: float | None = None,
) -> dict[str, Any]:
    """With a method, or to a budget from the weights alone."""
    shapes = Shape(hidden, intermediate, layers, 1, 1, vocabulary).tensors()
    checkpoint_bytes = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    with tempfile.TemporaryDirectory(prefix="factorpack-scale-") as folder:
        free = shutil.disk_usage(folder).free
        if free < 3 * checkpoint_bytes:  # the checkpoint, its parts, the file, and a margin
            raise SystemExit(
                f"{free / 1e9:.0f} GB are free in {folder}, {3 * checkpoint_bytes / 1e9:.0f} GB are needed"
            )
        source, packed = Path(folder) / "model", Path(folder) / "packed.safetensors"
        write_sharded(source, shapes, partial(_weight, generator=torch.Generator().manual_seed(0)))
        chosen = from_fields(METHODS, method) if method is not None else None
        engine = Recording(Local(workers))
        before = reset_peak()
        started = time.perf_counter()
        made = fp.compress(source, chosen, ratio=ratio, to=packed, engine=engine, progress=False)
        seconds = time.perf_counter() - started
        driver = peak_bytes()
        if chosen is not None:
            _check(made, source, chosen)
        found = engine.outcomes
        return {
            "parameters": checkpoint_bytes // 2,
            "tensors": len(shapes),
            "checkpoint_bytes": checkpoint_bytes,
            "largest_tensor_bytes": max(2 * torch.Size(shape).numel() for shape in shapes.values()),
            "file_bytes": packed.stat().st_size,
            "seconds": round(seconds, 1),
            "until_last_tensor_s": round(engine.ended - started, 1),
            "in_tasks_s": round(sum(outcome.seconds for outcome in found), 1),
            "cpu_in_tasks_s": round(sum(outcome.cpu_seconds for outcome in found), 1),
            "stated_bytes": max(outcome.task.memory_bytes for outcome in found),
            "worker_peak_bytes": max(outcome.peak_bytes for outcome in found),
            "workers": len({outcome.worker for outcome in found}),
            "driver_peak_bytes": driver,
            "driver_start_bytes": before,
            "load": round(os.getloadavg()[0], 1),
        }


class Recording:
    """An engine that keeps the outcomes of its tasks."""

    def __init__(self, engine: Local) -> None:
        self._engine = engine
        self.outcomes: list[Outcome] = []
        self.ended = 0.0

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        for outcome in self._engine.run(tasks):
            self.outcomes.append(outcome)
            yield outcome
        self.ended = time.perf_counter()


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Gaussian, with one scale per row."""
    scales = torch.randn((shape[0], *[1] * (len(shape) - 1)), generator=generator).mul_(0.3).exp_().mul_(0.02)
    return torch.randn(shape, generator=generator).mul_(scales).bfloat16()


def _check(packed: fp.Packed, source: Path, method: fp.methods.Method) -> None:
    opened = open_source(source)
    plan = Rules(method).plan(opened)
    coded = [name for name, choice in plan.items() if choice.method == method]
    for name in coded[:: max(len(coded) // CHECKED, 1)][:CHECKED]:
        expected = decode(plan[name].encode(opened.weight(name)))
        assert torch.equal(decode(packed[name]), expected), f"{name} is not what one process makes of it"


def tabulate() -> str:
    documents = {case: load_result("scale", case) for case in CASES}
    rows = [
        [CASES[case], *_cells(document["result"], document["settings"]["workers"])]
        for case, document in documents.items()
    ]
    head = ["method", "billion weights", "workers", "BF16 checkpoint, MB", "file, MB", "seconds"]
    head += ["CPU seconds in workers", "MB per CPU second", "largest tensor in FP32, MB"]
    head += ["peak of a worker, MB", "of the driver, MB"]
    notes = format_source(*documents.values())
    return f"{format_table(head, rows)}\n{notes}\n{_extrapolate(documents['scalar-2b']['result'])}"


def _cells(found: dict[str, Any], workers: int) -> list[str]:
    return [
        f"{found['parameters'] / 1e9:.2f}",
        str(workers),
        f"{found['checkpoint_bytes'] / 1e6:,.0f}",
        f"{found['file_bytes'] / 1e6:,.0f}",
        f"{found['seconds']:.0f}",
        f"{found['cpu_in_tasks_s']:.0f}",
        f"{_rate(found) / 1e6:.0f}",
        f"{2e-6 * found['largest_tensor_bytes']:.0f}",
        f"{found['worker_peak_bytes'] / 1e6:,.0f}",
        f"{found['driver_peak_bytes'] / 1e6:,.0f}",
    ]


def _rate(found: dict[str, Any]) -> float:
    """Bytes of checkpoint that a core compresses per second of CPU time."""
    return float(found["checkpoint_bytes"] / found["cpu_in_tasks_s"])


def _extrapolate(found: dict[str, Any]) -> str:
    """The same for a checkpoint of 70 billion weights."""
    seconds = 2 * LARGE / _rate(found)
    # A worker starts with the same interpreter and the same modules as the driver.
    start = found["driver_start_bytes"]
    per_element = (found["worker_peak_bytes"] - start) / (found["largest_tensor_bytes"] / 2)
    copied = found["file_bytes"] / (found["seconds"] - found["until_last_tensor_s"])
    file_bytes = LARGE * found["file_bytes"] / found["parameters"]
    memory = [(start + per_element * count) / 1e9 for count in (LARGE_TENSOR, LARGE_LAYER)]
    return (
        f"Extrapolated from the 4-bit run of {found['parameters'] / 1e9:.1f} billion weights: 70.6 billion weights "
        f"are {2 * LARGE / 1e9:.0f} GB of BF16. They take {seconds / 3600:.1f} core hours at "
        f"{_rate(found) / 1e6:.0f} MB per CPU second, or {seconds / CORES / 60:.1f} minutes on {CORES} idle cores "
        f"with storage that delivers {2e-9 * LARGE * CORES / seconds:.1f} GB/s. The embedding alone keeps one core "
        f"busy for {2 * LARGE_TENSOR / _rate(found) / 60:.1f} minutes. Above its start a worker takes "
        f"{per_element:.0f} bytes per element of its tensor: {memory[0]:.0f} GB for the 128,256 x 8,192 embedding, "
        f"{memory[1]:.1f} GB for the largest layer. The driver then copies {file_bytes / 1e9:.0f} GB of parts into "
        f"one file, which takes {file_bytes / copied / 60:.0f} minutes at the {copied / 1e6:.0f} MB/s measured "
        "here, including reading the file again.\n"
    )


def tabulate_kills() -> str:
    """Its command, which kills runs at random, is a tool and not a study; its result is stored with ours."""
    document = load_result("kills", "seed1")
    rows = [
        [
            name,
            str(count["kills"]),
            str(count["runs"]),
            str(count["final_files_seen"]),
            str(len(count["violations"])),
        ]
        for name, count in document["result"].items()
    ]
    head = ["command", "kills", "runs killed", "complete files seen after a kill", "violations"]
    return f"{format_table(head, rows)}\n{format_source(document)}"


CASES = {
    "scalar-0.1b-one-worker": "4-bit codes",
    "scalar-0.1b": "4-bit codes",
    "scalar-0.5b": "4-bit codes",
    "scalar-2b": "4-bit codes",
    "qspca-0.1b": "QSPCA, rank 64, 4 bits",
    "qspca-0.5b": "QSPCA, rank 64, 4 bits",
    "qspca-2b": "QSPCA, rank 64, 4 bits",
    "budget-0.1b": "`ratio=10`, planned",
}
LARGE, LARGE_TENSOR, LARGE_LAYER = 70.6e9, 128256 * 8192, 28672 * 8192
"""Weights of Llama 3 70B, of its embedding, and of its largest layer."""
CORES = 64
TABLES = {"scaled": tabulate, "killed": tabulate_kills}
