"""Rate-distortion optimised quantization: one step per tensor, and rounding that weighs the bits of every code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.method import Method
from factorpack.methods.second_order import encode_at
from factorpack.methods.settings import check_type, geometric
from factorpack.record import Encoded
from factorpack.solve.code_length import HIGH_RATE
from factorpack.solve.layer_problem import layer_problem
from factorpack.weight import Weight

QP_LIMIT = 500
QP_STEPS = 4
"""Quantization parameters per octave."""


@dataclass(frozen=True, slots=True)
class RDOQ(Method):
    """Codes of one step for a whole tensor, each with the least (w - q s)^2 + price s^2 bits(q).

    The step is `step` times the tensor's root mean square, or the one that the standard assigns to the
    integer `qp`: s = (1 + (qp mod 4) / 4) 2^floor(qp / 4), the same for every tensor.

    The rounding is that of DeepCABAC (Wiedemann et al. 2019); the streams are not. There, codes become binary
    decisions whose models adapt as they are read, with contexts from the code before. Here, a code is one
    symbol of an asymmetric numeral system with stored tables, and its context is the class of its row and
    column. The standard ISO/IEC 15938-17, based on DeepCABAC, also has quantizers that depend on each other:
    `factorpack compare --methods nncodec` runs its reference software.
    """

    step: float | None = None
    qp: int | None = None
    price: float = HIGH_RATE

    name: ClassVar[str] = "rdoq"
    title: ClassVar[str] = "RDOQ"
    suits_anything: ClassVar[bool] = True
    peak_factor: ClassVar[float] = 17.0

    def __post_init__(self) -> None:
        if (self.step is None) == (self.qp is None):
            raise PlanError(f"step is {self.step} and qp {self.qp}: give exactly one of them")
        check_type("price", self.price, float, int)
        if not 0 <= self.price < inf:
            raise PlanError(f"price is {self.price}, expected a number from 0 up")
        if self.step is not None:
            check_type("step", self.step, float, int)
            if not 0 < self.step < inf:
                raise PlanError(f"step is {self.step}, expected a number above 0")
        if self.qp is not None:
            check_type("qp", self.qp, int)
            if not -QP_LIMIT <= self.qp <= QP_LIMIT:
                raise PlanError(f"qp is {self.qp}, allowed are -{QP_LIMIT} to {QP_LIMIT}")

    def encode(self, weight: Weight) -> Encoded:
        rows = weight.rows()
        return encode_at(layer_problem(rows, None), self._step(rows), weight, self.price)

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(step) for step in reversed(geometric(0.01, 8.0, 96))]]

    def _step(self, rows: Tensor) -> float:
        if self.qp is not None:
            octave, quarter = divmod(self.qp, QP_STEPS)
            return float((1 + quarter / QP_STEPS) * 2.0**octave)
        assert self.step is not None
        rms = float(rows.double().square().mean().sqrt())
        return self.step * rms or 1.0  # a tensor of zeros is zero at any step
