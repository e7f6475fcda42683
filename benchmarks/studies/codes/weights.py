"""Weights as the planner prepares them, and what their codes take in the format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.data import checkpoint
from factorpack.budget.candidates import step_at_unit_slope
from factorpack.format.streams import coded_bytes
from factorpack.methods import SecondOrder
from factorpack.methods.second_order import as_encoded
from factorpack.quantize.uniform import storable
from factorpack.record import Encoded
from factorpack.solve.layer_problem import Problem
from factorpack.weight import Weight as Given

Matrix = NDArray[np.integer]
Point = tuple[float, float]
"""Bytes, and squared error in units of the weight's variance, summed."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    given: Given
    tile: int
    problem: Problem
    deviation: float
    """The standard deviation of the latents."""

    @property
    def unit(self) -> NDArray[np.float32]:
        """Latents of unit variance, (out, K)."""
        found: NDArray[np.float32] = (self.problem.latent[0] / self.deviation).numpy()
        return found

    def encoded(self, codes: NDArray[Any], step: float) -> Encoded:
        scale = storable(torch.tensor([[step * self.deviation]]))
        matrix = torch.from_numpy(codes.astype(np.float32))[None]
        return as_encoded(matrix, scale, self.problem.basis, self.given)


def weights_of(model: str) -> list[Weight]:
    if model == "gaussian":
        sample = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
        tensors: dict[str, Tensor] = {"sample": sample}
    else:
        tensors = {name: each for name, each in load_file(checkpoint(model)).items() if each.dim() > 1}
    found = []
    for each in tensors.values():
        kernel = each[0, 0].numel() if each.dim() > 2 else 1
        tile = kernel if kernel**2 * 8 <= each.numel() else 1  # as the planner chooses it
        given, method = Given(each), SecondOrder(step=1.0, tile=tile)
        found.append(Weight(given, tile, method.problem(given), step_at_unit_slope(given, method)))
    return found


def stream(weight: Weight, step: float, codes: NDArray[Any]) -> Point:
    return coded_bytes(weight.encoded(codes, step)), squared_error(weight, codes * step)


def rounded(weight: Weight, step: float, price: float) -> NDArray[np.float32]:
    codes, _ = weight.problem.round(torch.tensor([step * weight.deviation]), price)
    found: NDArray[np.float32] = codes[0, 0].numpy()
    return found


def squared_error(weight: Weight, values: NDArray[Any]) -> float:
    return float(np.square(weight.unit - values, dtype=np.float64).sum())


def fixed_bytes(encoded: Encoded) -> int:
    """Basis and scales."""
    return sum(
        part.numel() * part.dtype.itemsize
        for name, part in encoded.parts.items()
        if name not in ("codes", "latent")
    )
