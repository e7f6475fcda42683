"""Prune: the smallest weights of a tensor become zero, the others codes of a scale a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.protocol import check_type, rows_of
from factorpack.quantize.uniform import check_bits, fit_scale, to_codes
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.solve.threshold import largest_mask


@dataclass(frozen=True, slots=True)
class Prune:
    """Magnitude pruning (Han et al. 2015): a `sparsity` share of all weights, the smallest, is zero.

    What is left is rounded to `bits`-bit codes times an FP16 scale a channel, fitted to it alone. All
    zeros of the threshold count as extra, since it comes before the rounding: fine-tuning keeps them, and
    the fixed-width size counts a mask of one bit a weight and the codes that are not zero. The file has no
    mask: entropy coding makes zeros nearly free.
    """

    sparsity: float = 0.9
    bits: int = 8

    name: ClassVar[str] = "prune"

    def __post_init__(self) -> None:
        check_type("sparsity", self.sparsity, float, int)
        check_type("bits", self.bits, int)
        check_bits("bits", self.bits)
        if not 0.0 <= self.sparsity < 1.0:
            raise PlanError(f"sparsity is {self.sparsity}, allowed are 0 up to but not 1")

    def encode(
        self,
        weight: Tensor,
        transposed_groups: int = 0,
        sample: LayerSample | LayerMoments | None = None,  # noqa: ARG002
    ) -> Encoded:
        rows = rows_of(weight, transposed_groups)
        kept = rows.numel() - round(self.sparsity * rows.numel())
        pruned = torch.where(largest_mask(rows, rows, kept), rows, 0.0)
        scale = fit_scale(pruned, self.bits)
        return Encoded(
            "scalar",
            tuple(weight.shape),
            weight.dtype,
            {"codes": to_codes(pruned, scale, self.bits), "scale": scale},
            {"codes": self.bits},
            transposed_groups,
            extra_zeros=rows.numel() - kept,
        )
