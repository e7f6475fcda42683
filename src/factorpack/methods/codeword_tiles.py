"""What the methods of codewords share: how a weight is cut into tiles, and how codewords are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from factorpack.decoding import index_bits
from factorpack.errors import PlanError
from factorpack.methods.protocol import as_finite, check_type
from factorpack.methods.scalar import Scalar
from factorpack.quantize.uniform import MAX_STORED_BITS, code_dtype, storable_values
from factorpack.record import Encoded
from factorpack.solve.kmeans import nearest
from factorpack.tiles import out_first_shape, tile_count, to_tiles

Regime = Literal["small", "large"]
CODEWORDS = (2, 1 << MAX_STORED_BITS)
TILES = (1, 4096)
POINTWISE_TILE = 4
TILES_A_CODEWORD = 4
"""Fewer would make a codebook as large as what it saves."""
FALLBACK = Scalar(bits=8)


def check_settings(codewords: int, tile: int | None, iterations: int, seed: int) -> None:
    for name, value in (("codewords", codewords), ("iterations", iterations), ("seed", seed)):
        check_type(name, value, int)
    if not CODEWORDS[0] <= codewords <= CODEWORDS[1]:
        raise PlanError(f"codewords is {codewords}, allowed are {CODEWORDS[0]} to {CODEWORDS[1]}")
    if tile is not None:
        check_type("tile", tile, int)
        if not TILES[0] <= tile <= TILES[1]:
            raise PlanError(f"tile is {tile}, allowed are {TILES[0]} to {TILES[1]}")
    if iterations < 1:
        raise PlanError(f"iterations is {iterations}, expected at least 1")


def check_regime(regime: str) -> None:
    if regime not in get_args(Regime):
        raise PlanError(f"regime is {regime!r}, allowed are 'small' and 'large'")


def tile_of(shape: tuple[int, ...], transposed_groups: int = 0, regime: Regime = "small") -> int:
    """A kernel of a convolution that has one, else 4 numbers; twice that for large blocks where it divides.

    >>> tile_of((64, 32, 3, 3)), tile_of((64, 32, 1, 1)), tile_of((64, 32)), tile_of((64, 32), regime="large")
    (9, 4, 4, 8)
    """
    kernel = math.prod(shape[2:])
    small = kernel if kernel > 1 else POINTWISE_TILE
    filter_size = math.prod(out_first_shape(shape, transposed_groups)[1:])
    return 2 * small if regime == "large" and filter_size % (2 * small) == 0 else small


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A weight's tiles, in a unit in which no square overflows, and how many codewords they may have."""

    like: Encoded
    """What it will be, but for its parts."""
    points: Tensor
    """(n, d)."""
    unit: float
    """A power of two, about the largest number."""
    count: int

    def stored(self, codewords: Tensor) -> Tensor:
        """Codewords, (..., d), as they will be stored: FP16 where FP16 can hold them."""
        return storable_values(codewords * self.unit)

    def in_unit(self, stored: Tensor) -> Tensor:
        return stored.to(self.points) / self.unit

    def quantized(self, codewords: Tensor) -> Encoded:
        """Each tile as the nearest of the codewords, (k, d), as they are stored."""
        stored = self.stored(codewords)
        indices, _ = nearest(self.points, self.in_unit(stored))
        return self.encoded(stored[None], indices[None])

    def encoded(self, stored: Tensor, indices: Tensor) -> Encoded:
        """Codebooks (stages, k, d) and indices (stages, n)."""
        bits = index_bits(self.count)
        ordered = [_by_frequency(*stage, bits) for stage in zip(stored, indices, strict=True)]
        parts = {
            "codebook": torch.cat([codebook for codebook, _ in ordered]).contiguous(),
            "indices": torch.stack([codes for _, codes in ordered]).to(code_dtype(bits)),
        }
        like = self.like
        groups, note = like.transposed_groups, like.note
        return Encoded("codewords", like.shape, like.dtype, parts, {"indices": bits}, groups, note=note)


def _by_frequency(codebook: Tensor, indices: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codebook in another order, and codes for it: the more often it is used the nearer to 0.

    An entropy coder's tables are then short, and rows that use rare codewords can tell by their size.
    """
    count = len(codebook)
    codes = torch.arange(count, device=indices.device) - (1 << (bits - 1))
    places = (2 * codes.abs() - (codes < 0).long()).argsort()  # of 0, -1, 1, -2, 2, ...
    often = torch.bincount(indices, minlength=count).argsort(descending=True, stable=True)
    place_of = torch.empty_like(often)
    place_of[often] = places
    return torch.empty_like(codebook).index_copy_(0, place_of, codebook), codes[place_of][indices]


def cut(
    weight: Tensor, transposed_groups: int, tile: int, codewords: int, stages: int = 1
) -> Tiles | Encoded:
    """The tiles of a weight; or the weight in 8-bit codes, where codewords would not be smaller.

    There are at most a quarter as many codewords, of all stages together, as tiles, and at least two a stage.
    """
    working = as_finite(weight)
    tile = min(tile, working.numel())
    number = tile_count(working.numel(), tile)
    count = min(codewords, number // (TILES_A_CODEWORD * stages))
    bits = stages * (16 * count * tile + number * index_bits(count))
    if count < CODEWORDS[0] or bits >= 8 * working.numel():
        fallback = FALLBACK.encode(weight, transposed_groups)
        return fallback.noted(f"8-bit codes: codewords of {working.numel()} weights would not be smaller")
    note = "" if count == codewords else f"{count} codewords, not {codewords}: there are only {number} tiles"
    like = Encoded("codewords", tuple(weight.shape), weight.dtype, {}, {}, transposed_groups, note=note)
    unit = math.ldexp(1.0, math.frexp(working.abs().max().item())[1])
    points = to_tiles(working / unit, tile, transposed_groups).T.contiguous()
    return Tiles(like, points, unit, count)
