"""VQ: vector quantization, each tile of a weight one of a few codewords."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from factorpack.methods.codeword_tiles import (
    CLASSIFIER_CODEWORDS,
    CLASSIFIER_TILE,
    Regime,
    check_regime,
    check_settings,
    codeword_ladders,
    cut,
    tile_of,
)
from factorpack.methods.method import Method
from factorpack.record import Encoded
from factorpack.solve.kmeans import kmeans, spread
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class VQ(Method):
    """`codewords` tiles found by k-means stand for all tiles (Z one-hot in the paper's frame).

    A tile is a kernel of a convolution, or 4 numbers of a pointwise or linear layer, twice that in the
    "large" `regime`, or `tile` numbers.
    There are never more codewords than a quarter of the tiles; a weight that is larger so than in 8-bit
    codes gets `Scalar(8)`. The `note` says so.
    """

    codewords: int = 256
    tile: int | None = None
    regime: Regime = "small"
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
        start = spread(tiles.points, tiles.count, torch.Generator().manual_seed(self.seed))
        return tiles.quantized(kmeans(tiles.points, start, self.iterations))

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return codeword_ladders(cls)

    def for_classifier(self) -> Method:
        return replace(self, codewords=CLASSIFIER_CODEWORDS, tile=CLASSIFIER_TILE)

    def for_sizing(self) -> Method:
        return replace(self, iterations=1)
