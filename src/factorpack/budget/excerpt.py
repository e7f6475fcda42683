"""A small part of a weight that a method treats as it would the whole, and what of its bytes grows with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import TypeVar

import torch
from torch import Tensor

from factorpack.methods import QSPCA, Method
from factorpack.methods.svd import LowRank
from factorpack.record import Encoded
from factorpack.source import Source
from factorpack.tiles import out_first

T = TypeVar("T")
NUMBERS = 1 << 16
"""Numbers of a sample, unless a method needs more of them to do what it does to the whole."""
SAME_SHAPE = 3
"""Of large weights of one shape and method as many are sampled; the rest are taken to be like them."""
LARGE_IS_FASTER = 0.5
"""Seconds a number of a large weight for one of a sample, which has the same fixed costs: as measured."""
FEWEST_ROWS = 4
_FIXED = ("codebook", "codebook_scale", "mean", "value")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Some output channels of a weight, or some of their inputs too, and the method to encode them with."""

    values: Tensor
    method: Method
    growth: float
    """Numbers of the whole for one of the sample."""
    row_growth: float

    def whole_seconds(self, seconds: float) -> float:
        """What the whole would take, by what the sample took."""
        return seconds * (1 + LARGE_IS_FASTER * (self.growth - 1))

    def part_growth(self, encoded: Encoded, name: str) -> float:
        """How many times larger the whole's part of that name is than the sample's."""
        if isinstance(self.method, LowRank) and encoded.kind != "scalar":
            return self.growth if name in encoded.bits else sqrt(self.growth)  # scales: one a rank
        part = encoded.parts[name]
        if name in _FIXED or part.dim() == 0:
            return 1.0
        if name == "latent_scale":
            return 1.0 if part.shape[1] == 1 else self.growth
        if name in ("scale", "levels"):
            return 1.0 if len(part) == 1 else self.row_growth
        return self.growth


def sample_of(weight: Tensor, method: Method, transposed_groups: int = 0) -> Sample:
    """Evenly spaced rows, whole ones unless they are very long; a low rank needs columns left out alike."""
    enough = _enough(method, weight.numel())
    if weight.numel() <= enough:
        return Sample(weight, method, 1.0, 1.0)
    if weight.dim() < 2:
        return Sample(weight.flatten()[:enough], method, weight.numel() / enough, 1.0)
    whole = out_first(weight, transposed_groups)
    rows, columns = whole.shape[:2]
    share = enough / whole.numel()
    if isinstance(method, LowRank):
        if method.rank is not None:  # of the sample the same share of numbers, not the same rank
            flat = whole.numel() / rows
            part = min(method.rank * (rows + flat) / whole.numel(), 1.0)
            method = replace(method, rank=None, share=part)
        kept = ceil(rows * sqrt(share)), ceil(columns * sqrt(share))
    else:
        count = min(rows, max(ceil(rows * share), FEWEST_ROWS))
        kept = count, min(columns, ceil(columns * share * rows / count))
    values = whole[_spread(rows, kept[0])][:, : kept[1]]
    return Sample(values, method, whole.numel() / values.numel(), rows / kept[0])


def _enough(method: Method, numel: int) -> int:
    """A weight too small for its tile gets another one: the sample must not be that small by itself."""
    numbers = NUMBERS
    if isinstance(method, QSPCA):
        while numbers < numel and method.fit(numbers) != method.fit(numel):
            numbers *= 2
    return numbers


def _spread(total: int, count: int) -> Tensor:
    return torch.linspace(0, total - 1, count).round().long()


def of_a_few(source: Source, treated: Mapping[str, Hashable], measure: Callable[[str], T]) -> dict[str, T]:
    """`measure` of every small tensor and of some large ones of each shape, type and treatment.

    The other large ones are taken to be like those, in turn.
    """
    found: dict[str, T] = {}
    alike: dict[Hashable, list[T]] = defaultdict(list)
    for name, treatment in treated.items():
        entry = source.entries[name]
        seen = alike[entry.shape, entry.dtype, treatment]
        if entry.numel <= NUMBERS or len(seen) < SAME_SHAPE:
            found[name] = measure(name)
            seen.append(found[name])
        else:
            found[name] = seen[len(found) % SAME_SHAPE]
    return found
