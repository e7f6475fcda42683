"""Straight-through rounding: exact in the forward pass, the identity in the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from factorpack.quantize.uniform import code_range


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of `value`."""
    return rounded.detach() + (value - value.detach())  # adds an exact zero: the result is bit-identical


def fake_quantize(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Q(x; s, b) = clamp(round(x / s)) s, the paper's equations 4 and 5 with signed codes.

    Gradients pass through rounding, and stop at the clamp. The gradient of the scale is q - x/s inside the
    clamp and q outside, as in learned step size quantization. A row whose scale is zero gets zeros.
    """
    low, high = code_range(bits)
    with torch.no_grad():
        unit = rows / torch.where(scale > 0, scale, torch.inf)
        codes = unit.round().clamp(low, high)
        inside = (unit >= low) & (unit <= high) & (scale > 0)
        # The difference per element, not of two sums: values that equal their codes, as all do when
        # training starts, then give an exact zero, not rounding noise that Adam would scale to full steps.
        slope = torch.where(inside, codes - unit, codes)
    return straight_through(inside * rows + slope * scale, codes * scale)
