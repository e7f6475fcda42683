"""QSPCA: quantized sparse PCA, the paper's representation, found from the weights alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.method import EXCERPT_VALUES, Method
from factorpack.methods.scalar import Scalar
from factorpack.methods.settings import build_settings, check_type
from factorpack.quantize.uniform import Clip, check_bits, fit_scale, from_codes, to_codes
from factorpack.record import Encoded, LayerSample
from factorpack.solve.factor import best_latent, principal_basis
from factorpack.solve.projected import FactorProblem, ProjectedGradient
from factorpack.solve.threshold import entries_kept, extra_zero_mask
from factorpack.tiles import tile_count
from factorpack.weight import Weight

SMALLEST_HALVED_TILE = 16
TILES = (2, 4096)
FALLBACK = Scalar(bits=8)
COMPARED_RANKS = (4, 6, 8, 12, 16, 24, 32, *range(48, 257, 16))


@dataclass(frozen=True, slots=True)
class QSPCA(Method):
    """W~ = C Z + mu: a `codebook_bits` codebook and a sparse `latent_bits` latent of rank `rank`.

    The weight is cut into tiles of `tile` numbers; C starts from the first `rank` principal directions
    and is quantized a column at a time; Z solves least squares against the *quantized* C and is quantized
    with a scale a row (or a column); then the smallest `sparsity` share of all latents becomes zero, on
    top of those that rounding made zero.

    The paper needs rank <= tile <= number of tiles. Where a weight is too small for that, the tile is
    halved until it holds and the rank cut to the tile; where no tile from 16 up will do, or the factors
    would take more room than 8-bit codes, the weight gets `Scalar(8)`. The `note` says so.
    """

    rank: int
    latent_bits: int
    sparsity: float = 0.0
    codebook_bits: int = 4
    tile: int = 256
    latent_scales: Literal["row", "column"] = "row"
    center: bool = True
    clip: Clip = "mse"
    solver: ProjectedGradient | None = None
    """With calibration data: improve the factors on the layer's outputs, from the paper's own start."""

    name: ClassVar[str] = "qspca"
    title: ClassVar[str] = "the paper's QSPCA"

    def __post_init__(self) -> None:
        if isinstance(self.solver, Mapping):  # from a recipe
            object.__setattr__(self, "solver", build_settings(ProjectedGradient, self.solver, "the solver"))
        for field in ("rank", "latent_bits", "codebook_bits", "tile"):
            check_type(field, getattr(self, field), int)
        check_type("sparsity", self.sparsity, float, int)
        check_type("center", self.center, bool)
        check_bits("latent_bits", self.latent_bits)
        check_bits("codebook_bits", self.codebook_bits)
        if not TILES[0] <= self.tile <= TILES[1]:
            raise PlanError(f"tile is {self.tile}, allowed are {TILES[0]} to {TILES[1]}")
        if not 1 <= self.rank <= self.tile:
            raise PlanError(f"rank {self.rank} outside 1..{self.tile}, the tile size")
        if not 0.0 <= self.sparsity < 1.0:
            raise PlanError(f"sparsity is {self.sparsity}, allowed are 0 up to but not 1")
        if self.latent_scales not in ("row", "column"):
            raise PlanError(f"latent_scales is {self.latent_scales!r}, allowed are 'row' and 'column'")
        if self.clip not in ("mse", "minmax"):
            raise PlanError(f"clip is {self.clip!r}, allowed are 'mse' and 'minmax'")

    @property
    def samples(self) -> int:
        """Calibration samples a layer needs."""
        return self.solver.samples if self.solver is not None else 0

    def encode(self, weight: Weight) -> Encoded:
        sample = weight.inputs
        if self.solver is not None and not isinstance(sample, LayerSample):
            raise PlanError("a QSPCA with a solver looks at a layer's outputs: it needs calibration data")
        tile, rank = self.fit(weight.numel)
        if tile == 0:
            fallback = FALLBACK.encode(weight)
            return fallback.noted(f"8-bit codes: factors of {weight.numel} weights would not be smaller")
        matrix = weight.tiles(tile)  # (d, n)
        mean = matrix.mean(1, keepdim=True, dtype=torch.float64).float() if self.center else None
        if mean is not None:
            matrix = matrix - mean
        if self.solver is None or not isinstance(sample, LayerSample):
            parts, extra_zeros = self._factorize(matrix, rank)
        else:

            def to_weight(product: Tensor) -> Tensor:
                centred = product if mean is None else product + mean
                return weight.from_tiles(centred)

            parts, extra_zeros = self._optimize(matrix, rank, self.solver, sample, to_weight)
        if mean is not None:
            parts["mean"] = mean
        bits = {"codebook": self.codebook_bits, "latent": self.latent_bits}
        note = (
            "" if tile == self.tile else f"tile {tile} and rank {rank}: too few weights for tile {self.tile}"
        )
        return weight.encoded("factors", parts, bits, extra_zeros=extra_zeros, note=note)

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        solver = ProjectedGradient(steps=100, stop="validation")  # the paper's Algorithm 1
        return [
            [cls(rank, bits, clip="minmax", solver=solver) for rank in COMPARED_RANKS]
            for bits in (3, 4, 5, 6, 8)
        ]

    def without_data(self) -> Method:
        return replace(self, solver=None)

    def excerpt_values(self, numel: int) -> int:
        """A weight too small for its tile gets another one: the excerpt must not be that small itself."""
        values = EXCERPT_VALUES
        while values < numel and self.fit(values) != self.fit(numel):
            values *= 2
        return min(values, numel)

    def fit(self, numel: int) -> tuple[int, int]:
        """The tile and rank a weight of `numel` numbers gets; (0, 0) where it gets scalar codes."""
        tile = self.tile
        while tile > tile_count(numel, tile) and tile > SMALLEST_HALVED_TILE:
            tile = max(tile // 2, SMALLEST_HALVED_TILE)
        rank, count = min(self.rank, tile), tile_count(numel, tile)
        scales = 2 * rank if self.latent_scales == "row" else rank + count
        bits = tile * rank * self.codebook_bits + rank * count * self.latent_bits + 16 * scales
        bits += 32 * tile * self.center
        return (tile, rank) if tile <= count and bits < 8 * numel else (0, 0)

    def _factorize(self, matrix: Tensor, rank: int) -> tuple[dict[str, Tensor], int]:
        columns = principal_basis(matrix, rank).T.contiguous()  # (k, d): a scale a column of C
        codebook_scale = fit_scale(columns, self.codebook_bits, self.clip)
        codebook = to_codes(columns, codebook_scale, self.codebook_bits).T.contiguous()  # (d, k)
        latent = best_latent(from_codes(codebook, codebook_scale.T).to(matrix.dtype), matrix)  # (k, n)
        scaled = latent if self.latent_scales == "row" else latent.T
        latent_scale = fit_scale(scaled, self.latent_bits, self.clip)
        codes = to_codes(scaled, latent_scale, self.latent_bits)
        if self.latent_scales == "column":
            codes, latent_scale = codes.T.contiguous(), latent_scale.T
        keep = extra_zero_mask(from_codes(codes, latent_scale), latent, self.sparsity)
        codes = torch.where(keep, codes, torch.zeros_like(codes))
        return factor_parts(codebook, codebook_scale.T, codes, latent_scale), int(keep.numel() - keep.sum())

    def _optimize(
        self,
        matrix: Tensor,
        rank: int,
        solver: ProjectedGradient,
        sample: LayerSample,
        to_weight: Callable[[Tensor], Tensor],
    ) -> tuple[dict[str, Tensor], int]:
        """Algorithm 1: C <- U_k, Z <- U_k^T W~, scales from there; then the solver."""
        codebook = principal_basis(matrix, rank)
        latent = codebook.T @ matrix
        codebook_scale = fit_scale(codebook.T, self.codebook_bits, self.clip).T
        if self.latent_scales == "row":
            latent_scale = fit_scale(latent, self.latent_bits, self.clip)
        else:
            latent_scale = fit_scale(latent.T, self.latent_bits, self.clip).T
        start = to_codes(latent, latent_scale, self.latent_bits)
        kept = entries_kept(start, self.sparsity)
        problem = FactorProblem(
            codebook,
            latent,
            codebook_scale.to(matrix.dtype),
            latent_scale.to(matrix.dtype),
            self.codebook_bits,
            self.latent_bits,
            kept if self.sparsity else latent.numel(),
            to_weight,
        )
        codebook, latent = solver.solve(problem, sample)
        codes = to_codes(latent, latent_scale, self.latent_bits)
        extra_zeros = int(start.count_nonzero()) - kept
        return factor_parts(
            to_codes(codebook, codebook_scale, self.codebook_bits), codebook_scale, codes, latent_scale
        ), extra_zeros


def factor_parts(
    codebook: Tensor, codebook_scale: Tensor, latent: Tensor, latent_scale: Tensor
) -> dict[str, Tensor]:
    """(d, k), (1, k), (k, n), and (k, 1) or (1, n)."""
    named = {
        "codebook": codebook,
        "codebook_scale": codebook_scale,
        "latent": latent,
        "latent_scale": latent_scale,
    }
    return {name: part.contiguous() for name, part in named.items()}
