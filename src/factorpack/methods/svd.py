"""SVD: a weight matrix as a product of two thin ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.method import Method
from factorpack.methods.qspca import factor_parts
from factorpack.methods.scalar import Scalar
from factorpack.methods.settings import check_type, geometric
from factorpack.quantize.uniform import MAX_BITS, MAX_STORED_BITS, MIN_BITS, fit_scale, to_codes
from factorpack.record import Encoded
from factorpack.solve.factor import truncated
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class LowRank(Method):
    """What methods of two thin factors have in common: how thin, and how fine their codes are.

    Give the `rank`, or the `share` of the weight's own count of numbers that both factors may have
    together. Codes have `bits` bits, 16 of which can stand for FP16, and a scale for each of the rank's
    components in either factor, so that it does not matter how singular values are split between the two.
    Where the factors would hold no fewer numbers than the weight, it gets scalar codes; the `note` says so.
    """

    rank: int | None = None
    share: float | None = None
    bits: int = 8

    peak_factor: ClassVar[float] = 6.0

    def __post_init__(self) -> None:
        if (self.rank is None) == (self.share is None):
            raise PlanError(f"rank is {self.rank} and share {self.share}: give exactly one of them")
        if self.rank is not None:
            check_type("rank", self.rank, int)
            if self.rank < 1:
                raise PlanError(f"rank is {self.rank}, allowed are 1 and more")
        if self.share is not None:
            check_type("share", self.share, float, int)
            if not 0.0 < self.share <= 1.0:
                raise PlanError(f"share is {self.share}, allowed are numbers above 0 up to 1")
        check_type("bits", self.bits, int)
        if not MIN_BITS <= self.bits <= MAX_STORED_BITS:
            raise PlanError(f"bits is {self.bits}, allowed are {MIN_BITS} to {MAX_STORED_BITS}")

    def factorized(self, kind: str, matrix: Tensor, weight: Weight) -> Encoded:
        """The factors of a matrix that holds a weight's numbers in the order of `kind`."""
        rank = self._fit(*matrix.shape)
        if rank * sum(matrix.shape) >= matrix.numel():
            fallback = Scalar(min(self.bits, MAX_BITS)).encode(weight)
            return fallback.noted(f"codes: factors of rank {rank} would hold no fewer numbers")
        left, right = truncated(matrix, rank)
        left_scale, right_scale = fit_scale(left.T, self.bits), fit_scale(right, self.bits)
        parts = factor_parts(
            to_codes(left.T, left_scale, self.bits).T,
            left_scale.T,
            to_codes(right, right_scale, self.bits),
            right_scale,
        )
        bits = {"codebook": self.bits, "latent": self.bits}
        return weight.encoded(kind, parts, bits)

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(share=share) for share in geometric(0.005, 1.0, 48)]]

    def for_excerpt(self, rows: int, columns: int) -> tuple[Method, bool]:
        if self.rank is None:
            return self, True
        # An excerpt keeps the same share of values, not the same rank.
        share = min(self.rank * (rows + columns) / (rows * columns), 1.0)
        return replace(self, rank=None, share=share), True

    def _fit(self, rows: int, columns: int) -> int:
        if self.rank is not None:
            return self.rank
        assert self.share is not None
        return max(int(self.share * rows * columns / (rows + columns)), 1)


@dataclass(frozen=True, slots=True)
class SVD(LowRank):
    """The closest product U V of a given rank to the weight read as (out, in*h*w) (Denton et al. 2014)."""

    name: ClassVar[str] = "svd"
    title: ClassVar[str] = "SVD"

    def encode(self, weight: Weight) -> Encoded:
        matrix = weight.rows().T  # a tile is a filter
        return self.factorized("factors", matrix, weight)
