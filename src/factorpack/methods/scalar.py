"""Scalar: per-channel uniform quantization, one signed code a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from factorpack.errors import PlanError
from factorpack.methods.method import Method
from factorpack.methods.settings import check_type
from factorpack.quantize.uniform import Clip, check_bits, fit_scale, to_codes
from factorpack.record import Encoded
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class Scalar(Method):
    """Rounds each output channel to `bits`-bit codes times an FP16 scale (C = I in the paper's frame)."""

    bits: int = 8
    clip: Clip = "mse"

    name: ClassVar[str] = "scalar"
    title: ClassVar[str] = "rounding to nearest"
    suits_anything: ClassVar[bool] = True
    peak_factor: ClassVar[float] = 5.0

    def __post_init__(self) -> None:
        check_type("bits", self.bits, int)
        check_bits("bits", self.bits)
        if self.clip not in ("mse", "minmax"):
            raise PlanError(f"clip is {self.clip!r}, allowed are 'mse' and 'minmax'")

    def encode(self, weight: Weight) -> Encoded:
        rows = weight.rows()
        scale = fit_scale(rows, self.bits, self.clip)
        parts = {"codes": to_codes(rows, scale, self.bits), "scale": scale}
        return weight.encoded("scalar", parts, {"codes": self.bits})

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(bits) for bits in range(2, 9)]]
