"""SpatialSVD: filters as sums of a vertical one times a horizontal one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.protocol import as_finite
from factorpack.methods.svd import LowRank
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.tiles import to_spatial


@dataclass(frozen=True, slots=True)
class SpatialSVD(LowRank):
    """W[o, i, y, x] ~ sum_k v[k, i, y] u[o, k, x], the closest of its rank (Jaderberg et al. 2014).

    It is the truncated SVD of the weight read as (in*h, out*w).
    """

    name: ClassVar[str] = "spatial_svd"

    def encode(
        self,
        weight: Tensor,
        transposed_groups: int = 0,
        sample: LayerSample | LayerMoments | None = None,  # noqa: ARG002
    ) -> Encoded:
        if weight.dim() < 2:
            raise PlanError("a spatial SVD is for weights of two dimensions or more: keep this one")
        matrix = to_spatial(as_finite(weight), transposed_groups)
        return self.factorized("spatial", matrix, weight, transposed_groups)
