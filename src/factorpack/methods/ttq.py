"""TTQ: three levels a tensor or a channel, two of them learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.methods.protocol import check_type, rows_of
from factorpack.quantize.uniform import storable
from factorpack.record import Encoded, LayerMoments, LayerSample

BITS = 2


@dataclass(frozen=True, slots=True)
class TTQ:
    """Trained ternary quantization (Zhu et al. 2016): -W_n, 0 and W_p, told apart by +-t max|w|.

    t is `threshold`. The paper draws W_p and W_n from training; here they start as the means of what lies
    beyond the threshold, the best there are for these codes. `channels` gives every output channel a
    threshold and levels of its own. In fine-tuning the threshold stays where it is now, half a code from
    zero, and does not follow the largest weight.
    """

    threshold: float = 0.05
    channels: bool = False

    name: ClassVar[str] = "ttq"

    def __post_init__(self) -> None:
        check_type("threshold", self.threshold, float, int)
        check_type("channels", self.channels, bool)
        if not 0.0 <= self.threshold < 1.0:
            raise PlanError(f"threshold is {self.threshold}, allowed are 0 up to but not 1")

    def encode(
        self,
        weight: Tensor,
        transposed_groups: int = 0,
        sample: LayerSample | LayerMoments | None = None,  # noqa: ARG002
    ) -> Encoded:
        rows = rows_of(weight, transposed_groups)
        shared = rows if self.channels else rows.reshape(1, -1)
        edge = self.threshold * shared.abs().amax(1, keepdim=True)
        above, below = shared > edge, shared < -edge
        low, high = _mean(shared, below), _mean(shared, above)
        levels = storable(torch.cat([low, torch.zeros_like(low), high], 1))
        codes = (above.to(torch.int8) - below.to(torch.int8)).reshape(rows.shape)
        parts = {"codes": codes, "levels": levels}
        shape = tuple(weight.shape)
        return Encoded("levels", shape, weight.dtype, parts, {"codes": BITS}, transposed_groups)


def _mean(rows: Tensor, where: Tensor) -> Tensor:
    """The mean of some numbers in each row, zero where there are none: (r, n) -> (r, 1)."""
    total = torch.where(where, rows, 0.0).sum(1, keepdim=True, dtype=torch.float64)
    return total / where.sum(1, keepdim=True).clamp_min(1)
