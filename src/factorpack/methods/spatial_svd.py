"""SpatialSVD: filters as sums of a vertical one times a horizontal one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from factorpack.errors import PlanError
from factorpack.methods.svd import LowRank
from factorpack.record import Encoded
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class SpatialSVD(LowRank):
    """W[o, i, y, x] ~ sum_k v[k, i, y] u[o, k, x], the closest of its rank (Jaderberg et al. 2014).

    It is the truncated SVD of the weight read as (in*h, out*w).
    """

    name: ClassVar[str] = "spatial_svd"
    title: ClassVar[str] = "spatial SVD"
    peak_factor: ClassVar[float] = 12.0

    def encode(self, weight: Weight) -> Encoded:
        if weight.values.dim() < 2:
            raise PlanError("a spatial SVD is for weights of two dimensions or more: keep this one")
        return self.factorized("spatial", weight.spatial(), weight)
