"""The cost model of mode "auto": each layer's own inputs, in each mode, on this machine."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from factorpack.runtime.packed_layers import HeldWeight, PackedLayer, hold_packed

ROUNDS = 5
"""Runs of each mode, in turns, so that a slow moment of the machine affects all of them."""

Ways = Mapping[nn.Module, Mapping[str, tuple[type[PackedLayer], HeldWeight]]]


def time_layers(ways: Ways, run_example: Callable[[], object]) -> dict[nn.Module, dict[str, float]]:
    """Seconds of each layer that runs on the example, dense and in each class it could have."""
    found: dict[nn.Module, dict[str, float]] = {}

    def measure(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: object) -> None:
        runs = {"dense": layer.forward} | {
            mode: _variant(layer, cls, weight).forward for mode, (cls, weight) in ways[layer].items()
        }
        total = found.setdefault(layer, dict.fromkeys(runs, 0.0))
        for mode, seconds in least_seconds(runs, args, kwargs).items():
            total[mode] += seconds

    hooks = [layer.register_forward_hook(measure, with_kwargs=True) for layer in ways]
    try:
        run_example()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _variant(layer: nn.Module, cls: type[PackedLayer], weight: HeldWeight) -> nn.Module:
    """A converted copy of the layer, which shares everything but the weight with it."""
    variant = copy.copy(layer)
    variant._parameters, variant._modules = dict(layer._parameters), dict(layer._modules)
    hold_packed(variant, cls, weight)
    return variant


def least_seconds(
    runs: Mapping[str, Callable[..., object]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The least time of each function, called with the same arguments in turns, in alternating order.

    `time.process_time` as the clock leaves out other processes and adds up all threads.
    """
    least = dict.fromkeys(runs, float("inf"))
    for turn in range(rounds + 1):
        for mode, run in list(runs.items())[:: -1 if turn % 2 else 1]:
            _wait()
            started = clock()
            run(*args, **kwargs)
            _wait()
            if turn:  # the first warms up
                least[mode] = min(least[mode], clock() - started)
    return least


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
