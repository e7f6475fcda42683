"""BGD: codewords that keep a layer's output ("And the bit goes down", Stock et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch

from factorpack.errors import PlanError
from factorpack.methods.codeword_tiles import (
    CodewordMethod,
    Tiles,
    check_regime,
    check_settings,
    cut,
    tile_of,
)
from factorpack.methods.settings import check_type
from factorpack.methods.vq import VQ
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.block_metric import block_problem, restore_order
from factorpack.solve.kmeans import kmeans_plus_plus
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class BGD(CodewordMethod):
    """Vector quantization whose distances are those of the layer's output on calibration data.

    An error e of a tile costs e^T H e, with H the second moment of the inputs that the tile meets: its own
    per block of inputs with `gram="blocks"`, or the mean of all with `gram="shared"`, as in the paper, which
    puts the activations of all blocks into one matrix. Codewords are assigned, then moved to where their
    tiles cost least, in turns.

    Tiles are the paper's: small blocks are a kernel, or 4 values of a pointwise or linear layer, large ones
    twice that. There are at most a quarter as many codewords as tiles. Without calibration data, or where
    tiles do not divide a filter, this is `VQ`, and the `note` says so.
    """

    gram: Literal["blocks", "shared"] = "blocks"
    iterations: int = 30
    damping: float = 0.1
    """Share of the inputs' mean square that keeps tiles near their codewords where the sample has few inputs."""
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

    def _fitted(self, tiles: Tiles, moments: LayerMoments) -> Encoded:
        problem = block_problem(tiles.points, moments, self.gram == "shared", self.damping)
        points = problem.points.flatten(0, 1)
        energy = problem.metric.diagonal(dim1=1, dim2=2).mean(1).repeat_interleave(problem.points.shape[1])
        start = kmeans_plus_plus(points, tiles.count, torch.Generator().manual_seed(self.seed), energy)
        stored = tiles.stored(problem.solve(start, self.iterations))
        indices, _ = problem.nearest(tiles.in_unit(stored))
        return tiles.encoded(stored[None], restore_order(indices, len(moments.second))[None])
