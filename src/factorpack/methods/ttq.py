"""TTQ: three levels a tensor or a channel, two of them learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.keep import Keep
from factorpack.methods.method import Method
from factorpack.methods.settings import check_type
from factorpack.quantize.uniform import storable
from factorpack.record import Encoded
from factorpack.weight import Weight

BITS = 2


@dataclass(frozen=True, slots=True)
class TTQ(Method):
    """Trained ternary quantization (Zhu et al. 2016): -W_n, 0 and W_p, told apart by +-t max|w|.

    t is `threshold`. The paper draws W_p and W_n from training; here they start as the means of what lies
    beyond the threshold, the best there are for these codes. `channels` gives every output channel a
    threshold and levels of its own. In fine-tuning the threshold stays where it is now, half a code from
    zero, and does not follow the largest weight.
    """

    threshold: float = 0.05
    channels: bool = False

    name: ClassVar[str] = "ttq"
    title: ClassVar[str] = "TTQ"
    peak_factor: ClassVar[float] = 8.0

    def __post_init__(self) -> None:
        check_type("threshold", self.threshold, float, int)
        check_type("channels", self.channels, bool)
        if not 0.0 <= self.threshold < 1.0:
            raise PlanError(f"threshold is {self.threshold}, allowed are 0 up to but not 1")

    def encode(self, weight: Weight) -> Encoded:
        rows = weight.rows()
        shared = rows if self.channels else rows.reshape(1, -1)
        edge = self.threshold * shared.abs().amax(1, keepdim=True)
        above, below = shared > edge, shared < -edge
        low, high = _mean(shared, below), _mean(shared, above)
        levels = storable(torch.cat([low, torch.zeros_like(low), high], 1))
        codes = (above.to(torch.int8) - below.to(torch.int8)).reshape(rows.shape)
        parts = {"codes": codes, "levels": levels}
        return weight.encoded("levels", parts, {"codes": BITS})

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(share) for share in (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)]]

    def for_classifier(self) -> Method:
        return Keep()


def _mean(rows: Tensor, where: Tensor) -> Tensor:
    """The mean of some numbers in each row, zero where there are none: (r, n) -> (r, 1)."""
    total = torch.where(where, rows, 0.0).sum(1, keepdim=True, dtype=torch.float64)
    return total / where.sum(1, keepdim=True).clamp_min(1)
