"""What the codeword methods share: cutting a weight into tiles, and storing codewords."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.kinds.codewords import index_bits
from factorpack.methods.method import Method
from factorpack.methods.scalar import Scalar
from factorpack.methods.settings import check_type, powers_of_two
from factorpack.quantize.uniform import MAX_STORED_BITS, code_dtype, storable_values
from factorpack.record import Encoded
from factorpack.solve.kmeans import nearest
from factorpack.tiles import tile_count
from factorpack.weight import Weight

Regime = Literal["small", "large"]
CODEWORDS = (2, 1 << MAX_STORED_BITS)
TILES = (1, 4096)
POINTWISE_TILE = 4
CLASSIFIER_CODEWORDS, CLASSIFIER_TILE = 2048, 4
"""What the papers of BGD and PQF give ResNet18's classifier."""
TILES_PER_CODEWORD = 4
"""With fewer, a codebook takes as much as it saves."""
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


@dataclass(frozen=True, slots=True)
class CodewordMethod(Method):
    """What methods of one codebook share: its size, the tile of a codeword, and the traits that follow."""

    codewords: int = 256
    tile: int | None = None
    regime: Regime = "small"

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        """Codewords of whole kernels, then of smaller tiles: many short codewords make large files."""
        regimes: tuple[Regime, ...] = ("large", "small")
        kernels = [
            [cls(codewords=count, regime=regime) for count in powers_of_two(3, 11)] for regime in regimes
        ]
        small = [[cls(codewords=count, tile=tile) for count in powers_of_two(4, 12)] for tile in (4, 2)]
        return [*kernels, *small]

    def for_classifier(self) -> Method:
        return replace(self, codewords=CLASSIFIER_CODEWORDS, tile=CLASSIFIER_TILE)

    def for_sizing(self) -> Method:
        return replace(self, iterations=1)  # type: ignore[call-arg]  # a field of every such method


def tile_of(shape: tuple[int, ...], regime: Regime = "small", filter_size: int | None = None) -> int:
    """A kernel of a convolution that has one, else 4 values; twice that for large tiles where it divides.

    `filter_size` counts the values of one output filter, where the first dimension is not the outputs.

    >>> tile_of((64, 32, 3, 3)), tile_of((64, 32, 1, 1)), tile_of((64, 32)), tile_of((64, 32), "large")
    (9, 4, 4, 8)
    """
    kernel = math.prod(shape[2:])
    small = kernel if kernel > 1 else POINTWISE_TILE
    filter_size = math.prod(shape[1:]) if filter_size is None else filter_size
    return 2 * small if regime == "large" and filter_size % (2 * small) == 0 else small


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A weight's tiles, in a unit in which no square overflows, and the number of codewords they may have."""

    weight: Weight
    note: str
    points: Tensor
    """(n, d)."""
    unit: float
    """A power of two, about the largest value."""
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
        return self.weight.encoded("codewords", parts, {"indices": bits}, note=self.note)


def _by_frequency(codebook: Tensor, indices: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codebook in another order, and its codes: the more often a codeword is used, the nearer to 0.

    This keeps the entropy coder's tables short, and rows of rare codewords recognisable by their magnitude.
    """
    count = len(codebook)
    codes = torch.arange(count, device=indices.device) - (1 << (bits - 1))
    places = (2 * codes.abs() - (codes < 0).long()).argsort()  # of 0, -1, 1, -2, 2, ...
    often = torch.bincount(indices, minlength=count).argsort(descending=True, stable=True)
    place_of = torch.empty_like(often)
    place_of[often] = places
    return torch.empty_like(codebook).index_copy_(0, place_of, codebook), codes[place_of][indices]


def cut(weight: Weight, tile: int, codewords: int, stages: int = 1) -> Tiles | Encoded:
    """The tiles of a weight; or the weight in 8-bit codes, where codewords would not be smaller.

    There are at most a quarter as many codewords, in all stages together, as tiles, and at least two per stage.
    """
    working = weight.finite()
    tile = min(tile, working.numel())
    number = tile_count(working.numel(), tile)
    count = min(codewords, number // (TILES_PER_CODEWORD * stages))
    bits = stages * (16 * count * tile + number * index_bits(count))
    if count < CODEWORDS[0] or bits >= 8 * working.numel():
        fallback = FALLBACK.encode(weight)
        return fallback.noted(f"8-bit codes: codewords of {working.numel()} weights would not be smaller")
    note = "" if count == codewords else f"{count} codewords, not {codewords}: there are only {number} tiles"
    unit = math.ldexp(1.0, math.frexp(working.abs().max().item())[1])
    points = replace(weight, values=working / unit).tiles(tile).T.contiguous()
    return Tiles(weight, note, points, unit, count)
