"""VQ: vector quantization, each tile of a weight one of a few codewords."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from factorpack.methods.codeword_tiles import (
    CodewordMethod,
    check_regime,
    check_settings,
    cut,
    tile_of,
)
from factorpack.record import Encoded
from factorpack.solve.kmeans import kmeans, kmeans_plus_plus
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class VQ(CodewordMethod):
    """`codewords` tiles found by k-means represent all tiles (Z one-hot in the paper's notation).

    A tile is a kernel of a convolution, or 4 values of a pointwise or linear layer, twice that in the "large"
    `regime`, or `tile` values. There are never more codewords than a quarter of the tiles. A weight that
    would be larger than in 8-bit codes gets `Scalar(8)`. The `note` says so.
    """

    iterations: int = 30
    seed: int = 0

    name: ClassVar[str] = "vq"
    title: ClassVar[str] = "VQ"
    peak_factor: ClassVar[float] = 6.0

    def __post_init__(self) -> None:
        check_settings(self.codewords, self.tile, self.iterations, self.seed)
        check_regime(self.regime)

    def encode(self, weight: Weight) -> Encoded:
        tile = self.tile or tile_of(weight.shape, self.regime, weight.filter_size)
        tiles = cut(weight, tile, self.codewords)
        if isinstance(tiles, Encoded):
            return tiles
        start = kmeans_plus_plus(tiles.points, tiles.count, torch.Generator().manual_seed(self.seed))
        return tiles.quantized(kmeans(tiles.points, start, self.iterations))
