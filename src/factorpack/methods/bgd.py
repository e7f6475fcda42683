"""BGD: codewords that keep a layer's output ("And the bit goes down", Stock et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.codeword_tiles import Regime, Tiles, check_regime, check_settings, cut, tile_of
from factorpack.methods.protocol import check_type
from factorpack.methods.vq import VQ
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.solve.block_metric import block_problem, restore_order
from factorpack.solve.kmeans import kmeans_plus_plus


@dataclass(frozen=True, slots=True)
class BGD:
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

    def encode(
        self,
        weight: Tensor,
        transposed_groups: int = 0,
        sample: LayerSample | LayerMoments | None = None,
    ) -> Encoded:
        if isinstance(sample, LayerSample):
            raise PlanError("BGD takes moments of a layer's inputs, not a sample of them")
        tile = self.tile or tile_of(tuple(weight.shape), transposed_groups, self.regime)
        if sample is None or sample.second.shape[1] % tile:
            reason = "no calibration data" if sample is None else f"{tile} does not divide a filter"
            plain = VQ(self.codewords, tile, self.regime, self.iterations, self.seed)
            return plain.encode(weight, transposed_groups).noted(f"plain k-means: {reason}")
        tiles = cut(weight.to(sample.second.device), transposed_groups, tile, self.codewords)
        return tiles if isinstance(tiles, Encoded) else self._fitted(tiles, sample)

    def _fitted(self, tiles: Tiles, moments: LayerMoments) -> Encoded:
        problem = block_problem(tiles.points, moments, self.gram == "shared", self.damping)
        points = problem.points.flatten(0, 1)
        energy = problem.metric.diagonal(dim1=1, dim2=2).mean(1).repeat_interleave(problem.points.shape[1])
        start = kmeans_plus_plus(points, tiles.count, torch.Generator().manual_seed(self.seed), energy)
        stored = tiles.stored(problem.solve(start, self.iterations))
        indices, _ = problem.nearest(tiles.in_unit(stored))
        return tiles.encoded(stored[None], restore_order(indices, len(moments.second))[None])
