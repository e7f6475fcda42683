"""BGD: codewords that keep a layer's output ("And the bit goes down", Stock et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch

from factorpack.errors import PlanError
from factorpack.methods.codeword_tiles import (
    CLASSIFIER_CODEWORDS,
    CLASSIFIER_TILE,
    Regime,
    Tiles,
    check_regime,
    check_settings,
    codeword_ladders,
    cut,
    tile_of,
)
from factorpack.methods.method import Method
from factorpack.methods.settings import check_type
from factorpack.methods.vq import VQ
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.block_metric import block_problem, in_order
from factorpack.solve.kmeans import spread
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class BGD(Method):
    """Vector quantization whose distances are those of the layer's output on calibration data.

    An error e of a tile costs e^T H e, with H the second moment of the inputs that the tile meets: with
    `gram="blocks"` of each block of inputs its own, with `gram="shared"` the mean of all, as in the paper,
    whose activations of all blocks stand in one matrix. Codewords are then assigned, and moved to where
    their tiles cost least, by turns.

    Tiles are the paper's: small blocks are a kernel, or 4 numbers of a pointwise or linear layer, large
    ones twice that; there are at most a quarter as many codewords as tiles. Without calibration data, or
    where tiles do not divide a filter, this is `VQ`, and the `note` says so.
    """

    codewords: int = 256
    tile: int | None = None
    regime: Regime = "small"
    gram: Literal["blocks", "shared"] = "blocks"
    iterations: int = 30
    damping: float = 0.1
    """Of the inputs' mean square: what keeps a tile near its codeword where the sample hardly shows its inputs."""
    seed: int = 0
    samples: int = 64
    """Calibration samples a layer needs."""

    name: ClassVar[str] = "bgd"
    title: ClassVar[str] = "BGD"
    wants_moments: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self.codewords, self.tile, self.iterations, self.seed)
        check_regime(self.regime)
        if self.gram not in ("blocks", "shared"):
            raise PlanError(f"gram is {self.gram!r}, allowed are 'blocks' and 'shared'")
        check_type("damping", self.damping, float, int)
        check_type("samples", self.samples, int)
        if not 0 < self.damping < inf or self.samples < 0:
            raise PlanError(
                f"damping {self.damping}, samples {self.samples}: expected above 0, and from 0 up"
            )

    def encode(self, weight: Weight) -> Encoded:
        moments = self.moments_of(weight)
        tile = self.tile or tile_of(weight.shape, self.regime, weight.filter_size)
        if moments is None or moments.second.shape[1] % tile:
            reason = "no calibration data" if moments is None else f"{tile} does not divide a filter"
            plain = VQ(self.codewords, tile, self.regime, self.iterations, self.seed)
            return plain.encode(weight).noted(f"plain k-means: {reason}")
        moved = replace(weight, values=weight.values.to(moments.second.device))
        tiles = cut(moved, tile, self.codewords)
        return tiles if isinstance(tiles, Encoded) else self._fitted(tiles, moments)

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return codeword_ladders(cls)

    def for_classifier(self) -> Method:
        return replace(self, codewords=CLASSIFIER_CODEWORDS, tile=CLASSIFIER_TILE)

    def for_sizing(self) -> Method:
        return replace(self, iterations=1)

    def _fitted(self, tiles: Tiles, moments: LayerMoments) -> Encoded:
        problem = block_problem(tiles.points, moments, self.gram == "shared", self.damping)
        points = problem.points.flatten(0, 1)
        energy = problem.metric.diagonal(dim1=1, dim2=2).mean(1).repeat_interleave(problem.points.shape[1])
        start = spread(points, tiles.count, torch.Generator().manual_seed(self.seed), energy)
        stored = tiles.stored(problem.solve(start, self.iterations))
        indices, _ = problem.nearest(tiles.in_unit(stored))
        return tiles.encoded(stored[None], in_order(indices, len(moments.second))[None])
