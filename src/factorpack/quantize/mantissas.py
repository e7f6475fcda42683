"""Floats as sign, exponent and mantissa: how many bits of the mantissas are used, and rounding to fewer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[np.unsignedinteger[Any]]


class FloatType(NamedTuple):
    """A float type: from its highest bit to its lowest, a sign, the exponent, and the mantissa."""

    exponent_bits: int
    mantissa_bits: int
    held: type[np.unsignedinteger[Any]]
    """An integer of the same size."""


FLOAT_TYPES = {
    torch.float16: FloatType(5, 10, np.uint16),
    torch.bfloat16: FloatType(8, 7, np.uint16),
    torch.float32: FloatType(8, 23, np.uint32),
}


FEWEST_ROUNDED = 16
"""So many values do not all end in a zero by chance."""


def count_used_bits(values: Bits, kind: FloatType) -> int:
    """The highest bits of the mantissas up to the last that is set in some value."""
    used = int(np.bitwise_or.reduce(values, initial=0)) & (1 << kind.mantissa_bits) - 1
    return kind.mantissa_bits - (used & -used).bit_length() + 1 if used else 0


def used_bits(values: Tensor) -> int:
    """`count_used_bits` of a tensor whose type is in `FLOAT_TYPES`."""
    kind = FLOAT_TYPES[values.dtype]
    flat = values.detach().cpu().contiguous().reshape(-1)
    return count_used_bits(flat.view(torch.uint8).numpy().view(kind.held), kind) if len(flat) else 0


def round_mantissas(values: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Each value rounded to the nearest of those in `dtype` that have only the upper `bits` bits of the mantissa.

    What would become infinite, and what is not finite, is only converted.
    """
    wide = values.double()
    _, exponent = torch.frexp(wide.abs().clamp_min(torch.finfo(dtype).smallest_normal))
    step = torch.ldexp(torch.ones_like(wide), exponent - 1 - bits)
    rounded = (torch.round(wide / step) * step).to(dtype)
    return torch.where(rounded.isfinite(), rounded, values.to(dtype))
