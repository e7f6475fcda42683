"""Keep: a tensor stored as it is, in its own dtype or a smaller one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import PlanError, WeightError
from factorpack.methods.method import Method
from factorpack.record import DTYPES, Encoded
from factorpack.weight import Weight

_FLOATS = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}


@dataclass(frozen=True, slots=True)
class Keep(Method):
    """Stores values as they are, or rounded to the float type `dtype` ("float16", "bfloat16", ...).

    Integers and booleans are always kept exactly. Without `dtype` nothing changes, NaN and Inf included. Values
    too large for `dtype` are an error, and a warning counts those that it makes zero.
    """

    dtype: str | torch.dtype | None = None

    name: ClassVar[str] = "keep"
    title: ClassVar[str] = "kept as it is"
    keeps: ClassVar[bool] = True
    suits_anything: ClassVar[bool] = True
    peak_factor: ClassVar[float] = 3.0

    def __post_init__(self) -> None:
        if self._dtype is not None and self._dtype not in _FLOATS.values():
            raise PlanError(f"Keep rounds to one of {', '.join(_FLOATS)}, not to {self.dtype}")

    @property
    def _dtype(self) -> torch.dtype | None:
        if self.dtype is None or isinstance(self.dtype, torch.dtype):
            return self.dtype
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise PlanError(f"unknown dtype {self.dtype!r}, known are {', '.join(_FLOATS)}")
        return DTYPES[self.dtype]

    def encode(self, weight: Weight) -> Encoded:
        given = weight.values
        if given.dtype not in DTYPES.values():
            raise WeightError(f"{given.dtype} cannot be stored, known are {', '.join(DTYPES)}")
        # A copy: the model it came from may go on training.
        values = given.detach().clone(memory_format=torch.contiguous_format)
        if self._dtype is not None and values.is_floating_point():
            rounded = values.to(self._dtype)
            if _overflows(values, rounded):
                raise WeightError(f"values up to {values.double().abs().max():.3g} overflow {self._dtype}")
            _say_underflow(values, rounded)
            values = rounded
        return weight.encoded("keep", {"values": values})


def _say_underflow(values: Tensor, rounded: Tensor) -> None:
    """Warns where rounding makes values zero: one that is as small as that may still be a whole channel."""
    lost = values.float()[(values.float() != 0) & (rounded.float() == 0)]
    if lost.numel():
        warnings.warn(
            f"{lost.numel()} of {values.numel()} values are too small for {rounded.dtype} and become zero, "
            f"the largest is {lost.abs().max():.2g}",
            stacklevel=3,
        )


def _overflows(values: Tensor, rounded: Tensor) -> bool:
    """Whether rounding, or converting back, clips a value or makes it infinite."""
    wide = values.dtype if values.dtype.itemsize >= 4 else torch.float32  # 8-bit floats cannot be compared
    before, after = values.to(wide), rounded.to(values.dtype).to(wide)
    clipped = before.isfinite() & (before.abs() > torch.finfo(rounded.dtype).max)
    return bool((clipped | (before.isfinite() != after.isfinite())).any())
