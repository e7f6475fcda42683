"""ABC-Net: a weight as a weighted sum of sign matrices, stored as which of their sums it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.kinds.levels import level_range
from factorpack.methods.keep import Keep
from factorpack.methods.method import Method
from factorpack.methods.settings import check_type
from factorpack.quantize.uniform import storable
from factorpack.record import Encoded
from factorpack.weight import Weight

MOST_BASES = 5


@dataclass(frozen=True, slots=True)
class ABCNet(Method):
    """Accurate binary convolution (Lin et al. 2017), of weights alone: W ~ sum_i a_i B_i.

    B_i = sign(w - mean(w) + u_i std(w)), with M = `bases` shifts u_i spread evenly over [-1, 1] (0 for a
    single one), and a by least squares. A weight above one threshold is above all lower ones, so the sum
    has M + 1 values; the code of a weight is how many of its signs are positive, and the values are the
    levels. The paper counts M bits a weight, a bit a sign; M + 1 levels take the logarithm of that.
    `channels` gives every output channel a mean, a spread and factors of its own. In fine-tuning the
    levels learn one by one, which is one number more than the M factors.
    """

    bases: int = 3
    channels: bool = False

    name: ClassVar[str] = "abcnet"
    title: ClassVar[str] = "ABC-Net"

    def __post_init__(self) -> None:
        check_type("bases", self.bases, int)
        check_type("channels", self.channels, bool)
        if not 1 <= self.bases <= MOST_BASES:
            raise PlanError(f"bases is {self.bases}, allowed are 1 to {MOST_BASES}")

    def encode(self, weight: Weight) -> Encoded:
        rows = weight.rows()
        shared = rows if self.channels else rows.reshape(1, -1)
        positive = self._positive_signs(shared)
        levels = storable(_sums(shared, positive, self.bases))
        low, _ = level_range(self.bases + 1)
        parts = {"codes": (positive + low).to(torch.int8).reshape(rows.shape), "levels": levels}
        bits = {"codes": self.bases.bit_length()}
        return weight.encoded("levels", parts, bits)

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(bases) for bases in range(1, MOST_BASES + 1)]]

    def for_classifier(self) -> Method:
        return Keep()

    def _positive_signs(self, rows: Tensor) -> Tensor:
        """How many of the M signs of each number are positive: (r, n), whole."""
        wide = rows.double()
        mean, spread = wide.mean(1, keepdim=True), wide.std(1, correction=0, keepdim=True)
        shifts = torch.linspace(-1.0, 1.0, self.bases, dtype=wide.dtype) if self.bases > 1 else [0.0]
        count = torch.zeros_like(rows, dtype=torch.int64)
        for shift in shifts:
            count += wide - mean + float(shift) * spread >= 0
        return count


def _sums(rows: Tensor, positive: Tensor, bases: int) -> Tensor:
    """The M + 1 values of sum_i a_i B_i, for the a closest to each row: (r, n) -> (r, M + 1).

    The least squares only need to know how many numbers have each count of positive signs, and their sum.
    """
    one = torch.ones_like(rows, dtype=torch.float64)
    counts = one.new_zeros(len(rows), bases + 1).scatter_add_(1, positive, one)
    totals = torch.zeros_like(counts).scatter_add_(1, positive, rows.double())
    # With c positive signs, they are those of the c largest shifts: (M + 1, M).
    from_last = bases - torch.arange(bases + 1, device=rows.device)[:, None]
    signs = torch.where(torch.arange(bases, device=rows.device) >= from_last, 1.0, -1.0).double()
    normal = signs.T @ (counts[:, :, None] * signs)  # (r, M, M)
    factors = torch.linalg.pinv(normal, rtol=1e-10, hermitian=True) @ (totals @ signs)[:, :, None]
    sums: Tensor = (signs @ factors).squeeze(2) + 0.0  # no minus zero
    return sums
