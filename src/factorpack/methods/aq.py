"""AQ: additive quantization (Babenko and Lempitsky, 2014), each tile a sum of codewords."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.codeword_tiles import check_settings, cut, tile_of
from factorpack.methods.protocol import check_type
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.solve.additive import additive_quantize, update_codes

MOST_CODEWORDS = 4096
"""Of all codebooks together: they are solved for at once."""


@dataclass(frozen=True, slots=True)
class AQ:
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

    def __post_init__(self) -> None:
        check_settings(self.codewords, self.tile, self.iterations, self.seed)
        check_type("codebooks", self.codebooks, int)
        if self.codebooks < 1 or self.codebooks * self.codewords > MOST_CODEWORDS:
            raise PlanError(
                f"codebooks is {self.codebooks}, expected at least 1, and {MOST_CODEWORDS} codewords at most in all"
            )

    def encode(
        self,
        weight: Tensor,
        transposed_groups: int = 0,
        sample: LayerSample | LayerMoments | None = None,  # noqa: ARG002
    ) -> Encoded:
        tile = self.tile or tile_of(tuple(weight.shape), transposed_groups)
        tiles = cut(weight, transposed_groups, tile, self.codewords, self.codebooks)
        if isinstance(tiles, Encoded):
            return tiles
        generator = torch.Generator().manual_seed(self.seed)
        sums = additive_quantize(tiles.points, self.codebooks, tiles.count, self.iterations, generator)
        stored = tiles.stored(sums.codebooks)
        rounded = update_codes(replace(sums, codebooks=tiles.in_unit(stored)))
        return tiles.encoded(stored, rounded.indices)
