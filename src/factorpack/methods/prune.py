"""Prune: the smallest weights of a tensor become zero, the others codes of a scale a channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from factorpack.errors import PlanError
from factorpack.methods.method import Method
from factorpack.methods.settings import check_type, geometric
from factorpack.quantize.uniform import check_bits, fit_scale, to_codes
from factorpack.record import Encoded
from factorpack.solve.threshold import largest_mask
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class Prune(Method):
    """Magnitude pruning (Han et al. 2015): a `sparsity` share of all weights, the smallest, is zero.

    What is left is rounded to `bits`-bit codes times an FP16 scale a channel, fitted to it alone. All
    zeros of the threshold count as extra, since it comes before the rounding: fine-tuning keeps them, and
    the fixed-width size counts a mask of one bit a weight and the codes that are not zero. The file has no
    mask: entropy coding makes zeros nearly free.
    """

    sparsity: float = 0.9
    bits: int = 8

    name: ClassVar[str] = "prune"
    title: ClassVar[str] = "magnitude pruning"
    suits_anything: ClassVar[bool] = True
    peak_factor: ClassVar[float] = 6.0

    def __post_init__(self) -> None:
        check_type("sparsity", self.sparsity, float, int)
        check_type("bits", self.bits, int)
        check_bits("bits", self.bits)
        if not 0.0 <= self.sparsity < 1.0:
            raise PlanError(f"sparsity is {self.sparsity}, allowed are 0 up to but not 1")

    def encode(self, weight: Weight) -> Encoded:
        rows = weight.rows()
        kept = rows.numel() - round(self.sparsity * rows.numel())
        pruned = torch.where(largest_mask(rows, rows, kept), rows, 0.0)
        scale = fit_scale(pruned, self.bits)
        parts = {"codes": to_codes(pruned, scale, self.bits), "scale": scale}
        return weight.encoded("scalar", parts, {"codes": self.bits}, extra_zeros=rows.numel() - kept)

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(1 - share, bits=4) for share in geometric(0.005, 1.0, 48)]]
