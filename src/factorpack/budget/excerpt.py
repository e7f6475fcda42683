"""A small excerpt of a weight that a method treats as it would the whole, and how its bytes scale up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TypeVar

import torch
from torch import Tensor

from factorpack.methods import Method
from factorpack.methods.method import EXCERPT_VALUES
from factorpack.record import Encoded
from factorpack.source import Source
from factorpack.weight import Weight

T = TypeVar("T")
SAME_SHAPE = 3
"""Large weights of one shape and method that are looked at; the rest are taken to be like them."""
LARGE_IS_FASTER = 0.5
"""Seconds per value of a large weight, over those of an excerpt with the same fixed costs: as measured."""
FEWEST_ROWS = 4
_FIXED_PARTS = ("codebook", "codebook_scale", "mean", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Excerpt:
    """Some output channels of a weight, or some of their inputs too, and the method to encode them with."""

    weight: Weight
    method: Method
    growth: float
    """Values of the whole weight per value of the excerpt."""
    row_growth: float
    thin_both_ways: bool = False
    """Whether inputs are left out as outputs are, because the method is of low rank."""

    def whole_seconds(self, seconds: float) -> float:
        """What the whole weight would take, given what the excerpt took."""
        return seconds * (1 + LARGE_IS_FASTER * (self.growth - 1))

    def part_growth(self, encoded: Encoded, name: str) -> float:
        """How many times larger the whole weight's part of that name is."""
        if self.thin_both_ways and encoded.kind != "scalar":
            return self.growth if name in encoded.bits else sqrt(self.growth)  # scales: one per rank
        part = encoded.parts[name]
        if name in _FIXED_PARTS or part.dim() == 0:
            return 1.0
        if name == "latent_scale":
            return 1.0 if part.shape[1] == 1 else self.growth
        if name in ("scale", "levels"):
            return 1.0 if len(part) == 1 else self.row_growth
        return self.growth


def excerpt_of(weight: Weight, method: Method) -> Excerpt:
    """Evenly spaced rows, whole ones unless they are very long; a low rank needs columns left out alike."""
    enough = method.excerpt_values(weight.numel)
    if weight.numel <= enough:
        return Excerpt(weight, method, 1.0, 1.0)
    if weight.values.dim() < 2:
        return Excerpt(Weight(weight.values.flatten()[:enough]), method, weight.numel / enough, 1.0)
    whole = weight.layout.out_first(weight.values)
    rows, columns = whole.shape[:2]
    share = enough / whole.numel()
    method, thin_both_ways = method.for_excerpt(rows, whole.numel() // rows)
    if thin_both_ways:
        kept = ceil(rows * sqrt(share)), ceil(columns * sqrt(share))
    else:
        count = min(rows, max(ceil(rows * share), FEWEST_ROWS))
        kept = count, min(columns, ceil(columns * share * rows / count))
    values = whole[_evenly(rows, kept[0])][:, : kept[1]]
    growth = whole.numel() / values.numel()
    return Excerpt(Weight(values), method, growth, rows / kept[0], thin_both_ways)


def _evenly(total: int, count: int) -> Tensor:
    return torch.linspace(0, total - 1, count).round().long()


def measure_a_few(
    source: Source, treated: Mapping[str, Hashable], measure: Callable[[str], T]
) -> dict[str, T]:
    """`measure` of every small tensor and of some large ones of each shape, type and treatment.

    The other large ones are taken to be like those, in turn.
    """
    found: dict[str, T] = {}
    alike: dict[Hashable, list[T]] = defaultdict(list)
    for name, treatment in treated.items():
        entry = source.entries[name]
        seen = alike[entry.shape, entry.dtype, treatment]
        if entry.numel <= EXCERPT_VALUES or len(seen) < SAME_SHAPE:
            found[name] = measure(name)
            seen.append(found[name])
        else:
            found[name] = seen[len(found) % SAME_SHAPE]
    return found
