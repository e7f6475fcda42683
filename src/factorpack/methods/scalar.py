"""Scalar: per-channel uniform quantization, one signed code a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.protocol import check_type, rows_of
from factorpack.quantize.uniform import Clip, check_bits, fit_scale, to_codes
from factorpack.record import Encoded, LayerMoments, LayerSample


@dataclass(frozen=True, slots=True)
class Scalar:
    """Rounds each output channel to `bits`-bit codes times an FP16 scale (C = I in the paper's frame)."""

    bits: int = 8
    clip: Clip = "mse"

    name: ClassVar[str] = "scalar"

    def __post_init__(self) -> None:
        check_type("bits", self.bits, int)
        check_bits("bits", self.bits)
        if self.clip not in ("mse", "minmax"):
            raise PlanError(f"clip is {self.clip!r}, allowed are 'mse' and 'minmax'")

    def encode(
        self,
        weight: Tensor,
        transposed_groups: int = 0,
        sample: LayerSample | LayerMoments | None = None,  # noqa: ARG002
    ) -> Encoded:
        rows = rows_of(weight, transposed_groups)
        scale = fit_scale(rows, self.bits, self.clip)
        parts = {"codes": to_codes(rows, scale, self.bits), "scale": scale}
        shape = tuple(weight.shape)
        return Encoded("scalar", shape, weight.dtype, parts, {"codes": self.bits}, transposed_groups)
