"""Chooses how each layer runs in mode "auto", from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Layer = TypeVar("Layer")
MARGIN = 0.1
"""The share by which another mode must be faster than dense."""


def choose(
    seconds: Mapping[Layer, Mapping[str, float]], saved_bytes: Mapping[Layer, int], slack: float
) -> dict[Layer, str]:
    """The fastest mode of each layer; then less memory, for `slack` of the dense layers' time.

    Another mode replaces dense only where it is faster by more than `MARGIN`: less could be noise. The slack
    is spent on the layers that save most bytes per second of it.

    >>> seconds = {"a": {"dense": 10.0, "packed": 10.5}, "b": {"dense": 10.0, "packed": 19.0}}
    >>> choose(seconds, {"a": 100, "b": 100}, slack=0.0)
    {'a': 'dense', 'b': 'dense'}
    >>> choose(seconds, {"a": 100, "b": 100}, slack=0.05)
    {'a': 'packed', 'b': 'dense'}
    """
    chosen = {layer: _fastest(times) for layer, times in seconds.items()}
    left = slack * sum(times["dense"] for times in seconds.values())
    extra: dict[Layer, tuple[float, str]] = {}
    for layer, times in seconds.items():
        if chosen[layer] == "dense":
            mode = min(times.keys() - {"dense"}, key=lambda other: times[other])
            extra[layer] = times[mode] - times["dense"], mode
    for layer in sorted(extra, key=lambda each: extra[each][0] / max(saved_bytes[each], 1)):
        cost, mode = extra[layer]
        if cost <= left and slack > 0:
            chosen[layer] = mode
            left -= cost
    return chosen


def _fastest(times: Mapping[str, float]) -> str:
    mode = min(times, key=lambda each: times[each])
    return mode if times[mode] < (1 - MARGIN) * times["dense"] else "dense"
