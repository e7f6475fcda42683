"""Which weights keep a fixed width and which stay entropy-coded, where memory is limited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from factorpack.errors import PlanError

Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class FormBytes:
    """A weight's elements, and its bytes at a fixed width and entropy-coded."""

    elements: int
    packed: int
    coded: int
    is_table: bool = False
    """Whether only rows are looked up in it: fixed widths then save decoding all others."""


def fit_forms(weights: Mapping[str, FormBytes], max_memory: int, other_bytes: int = 0) -> dict[str, str]:
    """The form of each weight, "packed" or "coded": as many elements at a fixed width as fit, tables first.

    `other_bytes` of the limit are taken by the rest of the model.

    >>> sizes = {"a": FormBytes(100, 100, 30), "b": FormBytes(100, 50, 30)}
    >>> fit_forms(sizes, 100)
    {'a': 'coded', 'b': 'packed'}
    """
    chosen = {name: "packed" if each.packed <= each.coded else "coded" for name, each in weights.items()}
    least = other_bytes + sum(min(each.packed, each.coded) for each in weights.values())
    check_limit(least, max_memory)
    left = max_memory - least
    larger = [name for name, form in chosen.items() if form == "coded"]
    extra = {name: weights[name].packed - weights[name].coded for name in larger}
    gain = {name: (not weights[name].is_table, extra[name] / weights[name].elements) for name in larger}
    for name in sorted(larger, key=lambda each: gain[each]):
        if extra[name] <= left:
            chosen[name] = "packed"
            left -= extra[name]
    return chosen


def shrink(
    chosen: Mapping[Layer, str],
    seconds: Mapping[Layer, Mapping[str, float]],
    held_bytes: Mapping[Layer, Mapping[str, int]],
    max_memory: int,
    other_bytes: int = 0,
) -> dict[Layer, str]:
    """Modes that fit together: one after the other, the change that costs the least time for each byte saved.

    >>> seconds = {"a": {"dense": 1.0, "coded": 3.0}, "b": {"dense": 1.0, "coded": 2.0}}
    >>> sizes = {"a": {"dense": 80, "coded": 10}, "b": {"dense": 80, "coded": 10}}
    >>> shrink({"a": "dense", "b": "dense"}, seconds, sizes, 100)
    {'a': 'dense', 'b': 'coded'}
    """
    found = dict(chosen)
    least = other_bytes + sum(min(sizes.values()) for sizes in held_bytes.values())
    check_limit(least, max_memory)
    while other_bytes + sum(held_bytes[layer][mode] for layer, mode in found.items()) > max_memory:
        changes = [
            ((_seconds(seconds, layer, other) - _seconds(seconds, layer, mode)) / saved, number, other)
            for number, (layer, mode) in enumerate(found.items())
            for other, size in held_bytes[layer].items()
            if (saved := held_bytes[layer][mode] - size) > 0
        ]
        _, number, mode = min(changes)
        found[list(found)[number]] = mode
    return found


def check_limit(least: int, max_memory: int) -> None:
    if least > max_memory:
        raise PlanError(
            f"max_memory is {max_memory}, and the model takes {least} bytes even where weights stay entropy-coded",
            found=max_memory,
            allowed=least,
        )


def _seconds(seconds: Mapping[Layer, Mapping[str, float]], layer: Layer, mode: str) -> float:
    """A layer that did not run on the example costs nothing in any mode."""
    return seconds.get(layer, {}).get(mode, 0.0)
