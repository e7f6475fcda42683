"""AQ: additive quantization (Babenko and Lempitsky, 2014), each tile a sum of codewords."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from factorpack.errors import PlanError
from factorpack.methods.codeword_tiles import check_settings, cut, tile_of
from factorpack.methods.method import Method
from factorpack.methods.settings import check_type, powers_of_two
from factorpack.record import Encoded
from factorpack.solve.additive import additive, with_best_codes
from factorpack.weight import Weight

MOST_CODEWORDS = 4096
"""Of all codebooks together: they are solved for at once."""


@dataclass(frozen=True, slots=True)
class AQ(Method):
    """Each tile is a sum of `codebooks` codewords, one of each codebook (Z binary in the paper's frame).

    Tiles are those of `VQ`, so that an index more a tile is paid for a closer sum; a `tile` that is
    `codebooks` times as long has the rate of `VQ`.
    """

    codebooks: int = 2
    codewords: int = 256
    tile: int | None = None
    iterations: int = 10
    seed: int = 0

    name: ClassVar[str] = "aq"
    title: ClassVar[str] = "AQ"
    peak_factor: ClassVar[float] = 19.0

    def __post_init__(self) -> None:
        check_settings(self.codewords, self.tile, self.iterations, self.seed)
        check_type("codebooks", self.codebooks, int)
        if self.codebooks < 1 or self.codebooks * self.codewords > MOST_CODEWORDS:
            raise PlanError(
                f"codebooks is {self.codebooks}, expected at least 1, and {MOST_CODEWORDS} codewords at most in all"
            )

    def encode(self, weight: Weight) -> Encoded:
        tile = self.tile or tile_of(weight.shape)
        tiles = cut(weight, tile, self.codewords, self.codebooks)
        if isinstance(tiles, Encoded):
            return tiles
        generator = torch.Generator().manual_seed(self.seed)
        sums = additive(tiles.points, self.codebooks, tiles.count, self.iterations, generator)
        stored = tiles.stored(sums.codebooks)
        rounded = with_best_codes(replace(sums, codebooks=tiles.in_unit(stored)))
        return tiles.encoded(stored, rounded.indices)

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(codebooks, codewords) for codewords in powers_of_two(2, 9)] for codebooks in (2, 4)]

    def for_classifier(self) -> Method:
        return self

    def for_sizing(self) -> Method:
        return replace(self, iterations=1)
