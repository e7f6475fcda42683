"""Slices of a coded weight: each is a coded weight of its own and fills a range of the whole weight.

While a weight is rebuilt, its codes and factors are widened to floating point. Slice by slice, these fit a
core's cache. Most kinds are cut into runs of tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from factorpack.record import Encoded
from factorpack.tiles import tile_count

LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 17, 1 << 18
"""Limits of a slice: fewer are too few per torch call, and more, at about ten bytes each, exceed a cache."""
_SLICES = 16
"""Between the limits: a slice then takes at most a sixth of the weight's memory while it is rebuilt."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How parts lie along a weight's tiles."""

    size: int
    """Elements per tile."""
    axes: Mapping[str, int]
    """The axis of each part that has one entry per tile. A part shared by all tiles has a single entry."""


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive entries along an axis."""

    axis: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.axis, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Slice:
    """What to take from each part, the shape of the weight this gives, and where that weight belongs."""

    shape: tuple[int, ...]
    ranges: Mapping[str, Range]
    """By part; a part without one is taken whole."""
    view_shape: tuple[int, ...]
    """The view of the whole weight in which the slice is a range."""
    place: Range

    def take(self, encoded: Encoded) -> Encoded:
        """The slice as a coded weight."""
        parts = {
            name: self.ranges[name].of(part) if name in self.ranges else part
            for name, part in encoded.parts.items()
        }
        return replace(encoded, shape=self.shape, parts=parts)

    def write(self, rebuilt: Tensor, weight: Tensor) -> None:
        """Writes the rebuilt slice into the whole weight, which is contiguous."""
        target = self.place.of(weight.view(self.view_shape))
        target.copy_(rebuilt.reshape(target.shape))


def cut_tiles(numel: int, tiling: Tiling, parts: Shapes) -> list[Slice]:
    """Runs of tiles."""
    tile = tiling.size
    count, step = tile_count(numel, tile), slice_step(tile, numel)
    found = []
    for start in range(0, count, step):
        ranges = ranges_along(tiling.axes, parts, count, start, min(step, count - start))
        place = Range(0, start * tile, min(step * tile, numel - start * tile))
        found.append(Slice((place.length,), ranges, (numel,), place))
    return found


def ranges_along(
    axes: Mapping[str, int], parts: Shapes, count: int, start: int, length: int
) -> dict[str, Range]:
    """The same range of every part that has `count` entries along its axis."""
    return {
        name: Range(axis, start, length)
        for name, axis in axes.items()
        if name in parts and parts[name][axis] == count
    }


def slice_step(unit: int, numel: int) -> int:
    """How many units of `unit` elements make a slice: an even number, if more than one."""
    elements = min(max(numel // _SLICES, LEAST_ELEMENTS), MOST_ELEMENTS)
    return max(elements // unit // 2 * 2, 1)
