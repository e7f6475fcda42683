"""Large checkpoints: time and memory of compressing synthetic ones, Llama-shaped, BF16 and sharded, over an engine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import factorpack as fp
from benchmarks.measure import peak_bytes, reset_peak
from factorpack.decoding import decode
from factorpack.engine import Local, Outcome, Task
from factorpack.format.container import write_plain
from factorpack.methods import METHODS, from_fields
from factorpack.planning.rules import Rules
from factorpack.source import open_source

SHARD_NUMBERS = 500_000_000
"""About a gigabyte of BF16 a shard."""
CHECKED = 3
"""Tensors that are coded again in this process, to see that the file holds the same."""


def run(
    hidden: int,
    intermediate: int,
    layers: int,
    vocabulary: int,
    workers: int,
    method: dict[str, Any] | None = None,
    ratio: float | None = None,
) -> dict[str, Any]:
    """With a method, or into a budget from the weights alone."""
    shapes = _llama(hidden, intermediate, layers, vocabulary)
    checkpoint_bytes = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    with tempfile.TemporaryDirectory(prefix="factorpack-scale-") as folder:
        free = shutil.disk_usage(folder).free
        if free < 3 * checkpoint_bytes:  # the checkpoint, its parts, the file, and some air
            raise SystemExit(
                f"{free / 1e9:.0f} GB are free in {folder}, {3 * checkpoint_bytes / 1e9:.0f} needed"
            )
        source, packed = Path(folder) / "model", Path(folder) / "packed.safetensors"
        _write(source, shapes)
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
    """An engine, and what came of its tasks."""

    def __init__(self, engine: Local) -> None:
        self._engine = engine
        self.outcomes: list[Outcome] = []
        self.ended = 0.0

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        for outcome in self._engine.run(tasks):
            self.outcomes.append(outcome)
            yield outcome
        self.ended = time.perf_counter()


def _llama(hidden: int, intermediate: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder with gated layers, the head not tied."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (intermediate, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, intermediate)
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _write(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A sharded checkpoint, made and written a tensor at a time."""
    folder.mkdir()
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        if shards[-1] and held + count > SHARD_NUMBERS:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += count
    generator = torch.Generator().manual_seed(0)
    where = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        where |= dict.fromkeys(names, shard)
        tensors = {name: (torch.bfloat16, shapes[name]) for name in names}
        write_plain(folder / shard, tensors, (_weight(shapes[name], generator) for name in names))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Gaussian, each row of a scale of its own."""
    scales = torch.randn((shape[0], *[1] * (len(shape) - 1)), generator=generator).mul_(0.3).exp_().mul_(0.02)
    return torch.randn(shape, generator=generator).mul_(scales).bfloat16()


def _check(packed: fp.Packed, source: Path, method: fp.methods.Method) -> None:
    opened = open_source(source)
    plan = Rules(method).plan(opened)
    coded = [name for name, choice in plan.items() if choice.method == method]
    for name in coded[:: max(len(coded) // CHECKED, 1)][:CHECKED]:
        expected = decode(plan[name].encode(opened.weight(name)))
        assert torch.equal(decode(packed[name]), expected), f"{name} is not what one process makes of it"
