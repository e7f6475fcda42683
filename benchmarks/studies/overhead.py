"""The paper's section 3.4 in numbers: what codes cost each layer, counted, and measured on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import pretrained
from benchmarks.measure import one_thread_clock
from factorpack.methods import METHODS, from_fields
from factorpack.report.overhead import Cost, overhead
from factorpack.runtime.timing import least_seconds


def run(model: str, method: dict[str, Any], batch: int, rounds: int) -> dict[str, Any]:
    """Multiply-adds and bit operations of one forward, and each layer's least seconds in each way to run."""
    packed = fp.compress(pretrained(model), from_fields(METHODS, method), progress=False)
    example = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    report = overhead(packed, pretrained(model), example)
    seconds = _seconds(packed, model, example, list(report.layers), rounds)
    layers = [
        {"name": name, "rank": packed[name].parts["codebook"].shape[1], "seconds": seconds[name]}
        | {"bits": dict(packed[name].bits)}
        | _counts(cost)
        for name, cost in report.layers.items()
    ]
    clock = one_thread_clock().__name__
    threads = torch.get_num_threads()
    return {"threads": threads, "clock": clock, "layers": layers, "total": _counts(report.total)}


def _counts(cost: Cost) -> dict[str, Any]:
    return asdict(cost) | {"overhead": cost.overhead, "bit_overhead": cost.bit_overhead}


def _seconds(
    packed: fp.Packed, model: str, example: Tensor, weights: list[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Each layer on the inputs it meets, dense, packed and, where it can be, factored, in turns."""
    applied = {mode: packed.apply(pretrained(model), mode) for mode in ("dense", "packed", "factored")}
    modes = {layer.name: {"dense", "packed", layer.mode} for layer in applied["factored"].layers}
    found = {}
    with torch.inference_mode():
        for weight in weights:
            name = weight.removesuffix(".weight")
            inputs = _inputs(applied["dense"].model, name, example)
            runs = {
                mode: applied[mode].model.get_submodule(name) for mode in applied if mode in modes[weight]
            }
            found[weight] = least_seconds(runs, inputs, {}, rounds, one_thread_clock())
    return found


def _inputs(model: nn.Module, name: str, example: Tensor) -> tuple[Tensor, ...]:
    """What a layer is called with."""
    seen: list[tuple[Tensor, ...]] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    model(example)
    hook.remove()
    return seen[0]
