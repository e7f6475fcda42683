"""Rounding that training can see through: exact on the way forward, the identity on the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from factorpack.quantize.uniform import code_range


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of `value`."""
    return rounded.detach() + (value - value.detach())  # adds an exact zero: not a bit of it changes


def fake_quantize(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Q(x; s, b) = clamp(round(x / s)) s, the paper's equations 4 and 5 with signed codes.

    Gradients pass rounding, and stop at the clamp. The one with respect to the scale is q - x/s inside
    the clamp and q outside: learned-step quantization's. A row whose scale is zero gets zeros.
    """
    low, high = code_range(bits)
    with torch.no_grad():
        unit = rows / torch.where(scale > 0, scale, torch.inf)
        codes = unit.round().clamp(low, high)
        inside = (unit >= low) & (unit <= high) & (scale > 0)
        # The difference number by number, not of two sums: numbers that are their codes, as all are
        # when training starts, then leave no rounding noise, of which Adam would make whole steps.
        slope = torch.where(inside, codes - unit, codes)
    return straight_through(inside * rows + slope * scale, codes * scale)
