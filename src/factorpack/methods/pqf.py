"""PQF: the annealed quantizer of "Permute, Quantize, and Fine-tune" (Martinez et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch

from factorpack.errors import PlanError
from factorpack.methods.codeword_tiles import (
    CodewordMethod,
    check_regime,
    check_settings,
    cut,
    tile_of,
)
from factorpack.methods.settings import check_type
from factorpack.record import Encoded
from factorpack.solve.kmeans import annealed_kmeans, kmeans, kmeans_plus_plus
from factorpack.weight import Weight

SETTLING = 10
"""Steps without noise at the end."""


@dataclass(frozen=True, slots=True)
class PQF(CodewordMethod):
    """Vector quantization by k-means under decaying noise (SR-C), from the weights alone.

    Step i of `iterations` takes each codeword as the mean of its tiles plus noise of their own covariance, at
    temperature `heat` (1 - i / iterations)^`decay`. Tiles are those of `BGD`. The paper first permutes a
    network's channels; that works on whole models, and this quantizes the weight it is given.
    """

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
        start = kmeans_plus_plus(tiles.points, tiles.count, generator)
        annealed = annealed_kmeans(tiles.points, start, self.iterations, generator, self.heat, self.decay)
        return tiles.quantized(kmeans(tiles.points, annealed, SETTLING))
