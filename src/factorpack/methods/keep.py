"""Keep: a tensor that stays raw, in its own dtype or a smaller one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import PlanError, WeightError
from factorpack.record import DTYPES, Encoded


@dataclass(frozen=True, slots=True)
class Keep:
    """Stores values as they are, or rounded to the float type `dtype` ("float16", "bfloat16", ...).

    Integers and booleans are always kept exactly. Without `dtype` nothing changes, NaN and Inf included.
    """

    dtype: str | torch.dtype | None = None

    name: ClassVar[str] = "keep"

    def __post_init__(self) -> None:
        if self._dtype is not None and not self._dtype.is_floating_point:
            raise PlanError(f"Keep rounds to a float type, not {self.dtype}")

    @property
    def _dtype(self) -> torch.dtype | None:
        if self.dtype is None or isinstance(self.dtype, torch.dtype):
            return self.dtype
        if self.dtype not in DTYPES:
            floats = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
            raise PlanError(f"unknown dtype {self.dtype!r}, known are {', '.join(floats)}")
        return DTYPES[self.dtype]

    def encode(self, weight: Tensor, transposed_groups: int = 0) -> Encoded:
        if weight.dtype not in DTYPES.values():
            raise WeightError(f"{weight.dtype} cannot be stored, known are {', '.join(DTYPES)}")
        values = weight.detach().contiguous()
        if self._dtype is not None and values.is_floating_point():
            rounded = values.to(self._dtype)
            if bool((rounded.isinf() & values.isfinite()).any()):
                raise WeightError(f"values up to {values.abs().max():.3g} overflow {self._dtype}")
            values = rounded
        shape = tuple(weight.shape)
        return Encoded("keep", shape, weight.dtype, {"values": values}, {}, transposed_groups)
