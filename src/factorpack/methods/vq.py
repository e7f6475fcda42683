"""VQ: vector quantization, each tile of a weight one of a few codewords."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.methods.codeword_tiles import Regime, check_regime, check_settings, cut, tile_of
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.solve.kmeans import kmeans, kmeans_plus_plus


@dataclass(frozen=True, slots=True)
class VQ:
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

    def __post_init__(self) -> None:
        check_settings(self.codewords, self.tile, self.iterations, self.seed)
        check_regime(self.regime)

    def encode(
        self,
        weight: Tensor,
        transposed_groups: int = 0,
        sample: LayerSample | LayerMoments | None = None,  # noqa: ARG002
    ) -> Encoded:
        tile = self.tile or tile_of(tuple(weight.shape), transposed_groups, self.regime)
        tiles = cut(weight, transposed_groups, tile, self.codewords)
        if isinstance(tiles, Encoded):
            return tiles
        start = kmeans_plus_plus(tiles.points, tiles.count, torch.Generator().manual_seed(self.seed))
        return tiles.quantized(kmeans(tiles.points, start, self.iterations))
