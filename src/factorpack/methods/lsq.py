"""LSQ: uniform codes whose step is learned, from the start its paper gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from factorpack.errors import PlanError
from factorpack.methods.method import Method
from factorpack.methods.settings import check_type
from factorpack.quantize.uniform import MAX_BITS, code_range, storable, to_codes
from factorpack.record import Encoded
from factorpack.weight import Weight

BITS = (1, MAX_BITS)


@dataclass(frozen=True, slots=True)
class LSQ(Method):
    """Learned-step quantization (Esser et al. 2019): codes of a step 2 mean|w| / sqrt(Q_P).

    Q_P = 2^(bits-1) - 1 is the highest code. The step is a start for fine-tuning and not the closest;
    `Scalar` has that one. With `channels` every output channel has a step, otherwise the tensor has one.

    At one bit Q_P is 0, and the paper's formula is no number. The codes are signs there, as in the methods
    that came after it, and the step is mean|w|, the closest for signs: two levels, stored as such, since
    codes of one bit would be -1 and 0. They learn one by one.

    The paper multiplies a step's gradient by 1 / sqrt(N Q_P), N the weights that share it, so that plain
    gradient descent moves steps and weights by like shares of themselves. `fp.finetune` does without: its
    steps learn as logarithms and weights in units of their first step, which is that balance, and Adam
    divides each gradient by its own size, so that no constant factor in front of one changes anything.
    """

    bits: int = 4
    channels: bool = True

    name: ClassVar[str] = "lsq"
    title: ClassVar[str] = "LSQ"
    suits_anything: ClassVar[bool] = True
    peak_factor: ClassVar[float] = 6.0

    def __post_init__(self) -> None:
        check_type("bits", self.bits, int)
        check_type("channels", self.channels, bool)
        if not BITS[0] <= self.bits <= BITS[1]:
            raise PlanError(f"bits is {self.bits}, allowed are {BITS[0]} to {BITS[1]}")

    def encode(self, weight: Weight) -> Encoded:
        rows = weight.rows()
        shared = rows if self.channels else rows.reshape(1, -1)
        size = shared.abs().mean(1, keepdim=True, dtype=torch.float64)
        if self.bits == 1:
            kind, codes = "levels", torch.where(rows < 0, -1, 0).to(torch.int8)
            parts = {"codes": codes, "levels": storable(torch.cat([0.0 - size, size], 1))}
        else:
            scale = storable(2 * size / code_range(self.bits)[1] ** 0.5)
            kind, parts = "scalar", {"codes": to_codes(rows, scale, self.bits), "scale": scale}
        return weight.encoded(kind, parts, {"codes": self.bits})

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(bits) for bits in range(BITS[0], BITS[1] + 1)]]
