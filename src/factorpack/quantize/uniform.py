"""Signed uniform quantization with one scale per row: q = clamp(round(x / s)), x ~ q s.

The codes are [-2^(b-1), 2^(b-1) - 1], so zero is exact. Everything works on matrices whose rows
share a scale; callers transpose to share along columns.
"""

from __future__ import annotations

from math import inf
from typing import Literal

import torch
from torch import Tensor

from factorpack.errors import PlanError

Clip = Literal["mse", "minmax"]
MIN_BITS, MAX_BITS = 2, 8
"""Bits a method accepts."""
MAX_STORED_BITS = 16
"""Bits a file may hold: with one step per layer, codes are as wide as the layer's largest weight needs."""

SMALLEST_HALF, LARGEST_HALF = 2.0**-16, 65504.0
"""Scales between these are stored in FP16."""

# The clip search first tries these fractions of the min-max scale, then these multiples of the best one: at
# two bits heavy-tailed rows end near a tenth of it, at eight bits within a few percent of it.
_COARSE = [0.86**power for power in range(21)]
_FINE = (0.9, 0.93, 0.96, 1.04, 1.07, 0.98, 0.99, 1.01, 1.02)


def check_bits(name: str, bits: int) -> None:
    if not MIN_BITS <= bits <= MAX_BITS:
        raise PlanError(f"{name} is {bits}, allowed are {MIN_BITS} to {MAX_BITS}")


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code of a bit width.

    >>> code_range(3)
    (-4, 3)
    """
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def code_width(low: int, high: int) -> int:
    """Bits that signed codes from `low` to `high` need.

    >>> code_width(-4, 3)
    3
    """
    return 1 + max(value.bit_length() for value in (max(high, 0), -min(low, -1) - 1))


def code_dtype(bits: int) -> torch.dtype:
    """The dtype for codes of a bit width."""
    return torch.int8 if bits <= 8 else torch.int16


def fit_scale(rows: Tensor, bits: int, clip: Clip = "mse") -> Tensor:
    """One scale per row of (r, n), as it will be stored: (r, 1), in FP16 if that can hold it."""
    start = minmax_scale(rows, bits)
    return storable(start if clip == "minmax" else mse_scale(rows, bits, start))


def minmax_scale(rows: Tensor, bits: int) -> Tensor:
    """The smallest scale that clips nothing: (r, n) -> (r, 1)."""
    low, high = code_range(bits)
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], 1)
    return torch.maximum(rows.amax(1, keepdim=True) / high, rows.amin(1, keepdim=True) / low).clamp_min(0)


def mse_scale(rows: Tensor, bits: int, start: Tensor) -> Tensor:
    """The multiple of `start` with the least squared rounding error found, per row: (r, n) -> (r, 1)."""
    best, best_error = torch.ones_like(start), torch.full_like(start, torch.inf)
    unit = rows / _divisor(start)  # in units of `start` no square overflows or underflows

    def consider(shrink: Tensor) -> None:
        nonlocal best, best_error
        error = _clamped(unit / shrink, bits).mul_(shrink).sub_(unit).square_().sum(1, keepdim=True)
        better = error < best_error
        best, best_error = torch.where(better, shrink, best), torch.where(better, error, best_error)

    for share in _COARSE:
        consider(torch.full_like(start, share))
    for multiple in _FINE:
        consider((best * multiple).clamp(max=1.0))
    return start * best


def storable(scale: Tensor) -> Tensor:
    """Rounds scales, or signed levels, to FP16, or to FP32 if FP16 would overflow or lose precision that
    matters."""
    if scale.numel() == 1:  # as below, in a single look at the device
        least = largest = abs(scale.item())
    else:
        size = scale.abs()
        largest = size.max().item() if size.numel() else 0.0
        matters = size[size > largest * 2.0**-20]
        least = matters.min().item() if matters.numel() else 0.0
    fits = not 0.0 < largest < inf or (least >= SMALLEST_HALF and largest <= LARGEST_HALF)
    return scale.to(torch.float16 if fits else torch.float32)


def storable_alone(scales: Tensor) -> Tensor:
    """The values of `storable` for FP32 scales that are stored each by itself, in FP32."""
    size = scales.abs()
    fits = ~((size > 0) & (size < inf)) | ((size >= SMALLEST_HALF) & (size <= LARGEST_HALF))
    return torch.where(fits, scales.to(torch.float16).float(), scales)


def storable_values(values: Tensor) -> Tensor:
    """Rounds values to FP16, or to FP32 if FP16 would overflow or lose precision.

    The error is judged relative to the values' overall size: below 2^-14 FP16 has fewer bits.
    """
    size = root_mean_square(values)
    fits = size == 0 or (size >= 2.0**-14 and values.abs().max().item() <= 65504.0)
    return values.to(torch.float16 if fits else torch.float32)


def root_mean_square(values: Tensor) -> float:
    """Safe for values whose squares would overflow or underflow; 0 for no values."""
    largest = values.abs().max().item() if values.numel() else 0.0
    return (values / largest).square().mean().sqrt().item() * largest if largest else 0.0


def to_codes(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Nearest codes, int8, or int16 above 8 bits. A row whose scale is zero gets zeros."""
    return _clamped(rows / _divisor(scale.to(rows.dtype)), bits).to(code_dtype(bits))


def _clamped(unit: Tensor, bits: int) -> Tensor:
    """Rounds and clamps in place."""
    return unit.round_().clamp_(*code_range(bits))


def _divisor(scale: Tensor) -> Tensor:
    """For dividing rows, not multiplying by a reciprocal: that of a subnormal scale is infinite."""
    return torch.where(scale > 0, scale, torch.inf)


def from_codes(codes: Tensor, scale: Tensor) -> Tensor:
    """The values of the codes, in the scale's dtype but at least FP32."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    values = codes.to(wide)
    # Integer codes were just copied, so in-place is safe; floating-point ones, in training, may not be.
    return values * scale.to(wide) if codes.dtype.is_floating_point else values.mul_(scale.to(wide))
