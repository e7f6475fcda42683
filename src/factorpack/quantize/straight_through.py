"""Rounding that training can see through: exact on the way forward, the identity on the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from factorpack.quantize.uniform import code_range


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of `value`."""
    return rounded.detach() + (value - value.detach())  # adds an exact zero: not a bit of it changes


def fake_codes(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The codes of `rows`, in float: clamp(round(x / s)). Gradients pass rounding, and stop at the clamp.

    A row whose scale is zero gets zeros.
    """
    low, high = code_range(bits)
    inside = (rows / torch.where(scale > 0, scale, torch.inf)).clamp(low, high)
    return straight_through(inside, inside.round())


def fake_quantize(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Q(x; s, b) = clamp(round(x / s)) s, the paper's equations 4 and 5 with signed codes.

    The gradient with respect to the scale is q - x/s inside the clamp and q outside: learned-step
    quantization's.
    """
    return fake_codes(rows, scale, bits) * scale
