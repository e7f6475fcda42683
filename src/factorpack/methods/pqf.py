"""PQF: the annealed quantizer of "Permute, Quantize, and Fine-tune" (Martinez et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch

from factorpack.errors import PlanError
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
from factorpack.methods.settings import check_type
from factorpack.record import Encoded
from factorpack.solve.kmeans import annealed_kmeans, kmeans, spread
from factorpack.weight import Weight

SETTLING = 10
"""Steps without noise after the others."""


@dataclass(frozen=True, slots=True)
class PQF(Method):
    """Vector quantization by k-means under noise that dies away (SR-C), from the weights alone.

    Step i of `iterations` takes each codeword as the mean of tiles with noise of their own covariance, of
    temperature `heat` (1 - i / iterations)^`decay`. Tiles are those of `BGD`. The paper first permutes a
    network's channels: that is a step on models, and this quantizes the weight it is given.
    """

    codewords: int = 256
    tile: int | None = None
    regime: Regime = "small"
    iterations: int = 50
    heat: float = 1.0
    decay: float = 0.5
    seed: int = 0

    name: ClassVar[str] = "pqf"
    title: ClassVar[str] = "PQF"
    permutes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self.codewords, self.tile, self.iterations, self.seed)
        check_regime(self.regime)
        for field in ("heat", "decay"):
            check_type(field, getattr(self, field), float, int)
            if not 0 <= getattr(self, field) < inf:
                raise PlanError(f"{field} is {getattr(self, field)}, expected a number from 0 up")

    def encode(self, weight: Weight) -> Encoded:
        tile = self.tile or tile_of(weight.shape, self.regime, weight.filter_size)
        tiles = cut(weight, tile, self.codewords)
        if isinstance(tiles, Encoded):
            return tiles
        generator = torch.Generator().manual_seed(self.seed)
        start = spread(tiles.points, tiles.count, generator)
        annealed = annealed_kmeans(tiles.points, start, self.iterations, generator, self.heat, self.decay)
        return tiles.quantized(kmeans(tiles.points, annealed, SETTLING))

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return codeword_ladders(cls)

    def for_classifier(self) -> Method:
        return replace(self, codewords=CLASSIFIER_CODEWORDS, tile=CLASSIFIER_TILE)

    def for_sizing(self) -> Method:
        return replace(self, iterations=1)
