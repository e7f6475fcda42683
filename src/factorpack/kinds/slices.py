"""A coded weight in pieces: each is a coded weight of its own, and fills a range of the whole one.

What is wide while a weight is rebuilt, codes and factors in floating point, is then as large as a piece and
stays in a core's cache. Kinds that are cut along their tiles give runs of tiles; factors whose codebook is
the larger of the two, as those of low-rank filters, give the same rows of every tile, and spatial factors
some input channels of every filter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from factorpack.record import Encoded
from factorpack.tiles import out_first_shape, spatial_shape, tile_count

LEAST_NUMBERS, MOST_NUMBERS = 1 << 17, 1 << 18
"""Of a piece: fewer are too few for torch's calls, and more, about ten bytes each, no longer fit a cache."""
_PIECES = 16
"""Between these: a piece then takes at most a sixth of the weight's memory while it is rebuilt."""

ALONG_TILES = {
    "factors": {"latent": 1, "latent_scale": 1},
    "codewords": {"indices": 1},
    "scalar": {"codes": 0, "scale": 0},
    "levels": {"codes": 0, "levels": 0},
}
"""The axis of each part that has an entry a tile; one that is shared by all tiles has a single entry there."""
_ALONG_ROWS = {"factors": {"codebook": 0, "mean": 0}, "spatial": {"codebook": 0}}
"""The same for parts with an entry a row of the tiles."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Range:
    """Some entries along an axis."""

    axis: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.axis, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Piece:
    """What to take of each part, the shape of the weight that this is, and where that belongs."""

    shape: tuple[int, ...]
    parts: Mapping[str, Range]
    seen_as: tuple[int, ...]
    """The shape of the whole weight of which the piece is a range."""
    place: Range

    def put(self, rebuilt: Tensor, weight: Tensor) -> None:
        """Writes what was rebuilt from the piece into the whole, which is contiguous."""
        target = self.place.of(weight.view(self.seen_as))
        target.copy_(rebuilt.reshape(target.shape))


def pieces(kind: str, shape: tuple[int, ...], transposed_groups: int, parts: Shapes) -> list[Piece]:
    """The pieces of a weight whose parts have these shapes; none where it can only be rebuilt whole."""
    numel = math.prod(shape)
    if transposed_groups or not numel or kind not in (*ALONG_TILES, *_ALONG_ROWS):
        return []
    if kind == "spatial":
        return _input_pieces(shape, parts)
    tile = tile_numbers(kind, parts)
    count = tile_count(numel, tile)
    if kind == "factors" and tile > count and numel % tile == 0:
        return _row_pieces(count, tile, parts)
    return _tile_pieces(kind, numel, tile, parts)


def piece_of(encoded: Encoded, piece: Piece) -> Encoded:
    """The piece as a coded weight."""
    parts = {
        name: piece.parts[name].of(part) if name in piece.parts else part
        for name, part in encoded.parts.items()
    }
    return replace(encoded, shape=piece.shape, parts=parts)


def tile_numbers(kind: str, parts: Shapes) -> int:
    """Numbers of a tile, of a kind that is cut along its tiles."""
    if kind == "codewords":
        return parts["codebook"][1]
    return parts["codebook"][0] if kind == "factors" else parts["codes"][1]


def _tile_pieces(kind: str, numel: int, tile: int, parts: Shapes) -> list[Piece]:
    count, step = tile_count(numel, tile), _step(tile, numel)
    found = []
    for start in range(0, count, step):
        ranges = _ranges(ALONG_TILES[kind], parts, count, start, min(step, count - start))
        place = Range(0, start * tile, min(step * tile, numel - start * tile))
        found.append(Piece((place.length,), ranges, (numel,), place))
    return found


def _row_pieces(count: int, tile: int, parts: Shapes) -> list[Piece]:
    step = _step(count, count * tile)
    return [
        Piece(
            (count * length,),
            _ranges(_ALONG_ROWS["factors"], parts, tile, start, length),
            (count, tile),
            Range(1, start, length),
        )
        for start in range(0, tile, step)
        for length in (min(step, tile - start),)
    ]


def _input_pieces(shape: tuple[int, ...], parts: Shapes) -> list[Piece]:
    outputs, inputs, height, width = spatial_shape(shape)
    kernel = out_first_shape(shape)[2:]
    step = _step(outputs * height * width, math.prod(shape))
    return [
        Piece(
            (outputs, length, *kernel),
            _ranges(_ALONG_ROWS["spatial"], parts, inputs * height, start * height, length * height),
            (outputs, inputs, height * width),
            Range(1, start, length),
        )
        for start in range(0, inputs, step)
        for length in (min(step, inputs - start),)
    ]


def _ranges(axes: Mapping[str, int], parts: Shapes, count: int, start: int, length: int) -> dict[str, Range]:
    """Of the parts that have `count` entries along their axis."""
    return {
        name: Range(axis, start, length)
        for name, axis in axes.items()
        if name in parts and parts[name][axis] == count
    }


def _step(unit: int, numel: int) -> int:
    """How many things of `unit` numbers make a piece; an even number, where there are several."""
    numbers = min(max(numel // _PIECES, LEAST_NUMBERS), MOST_NUMBERS)
    return max(numbers // unit // 2 * 2, 1)
