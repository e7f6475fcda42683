"""How many bits of mantissa the values of norms and biases keep in a budget, and rounding to them."""

from __future__ import annotations

from collections.abc import Iterable
from math import log2, prod

from torch import Tensor

from factorpack.quantize.mantissas import FEWEST_ROUNDED, FLOAT_TYPES, round_mantissas, used_bits

FEWEST_BITS, MOST_BITS = 4, 10
"""Fewer cost more than they save at any size; FP16 has no more."""
NORM_PARTS = ("weight", "bias", "running_mean", "running_var")
MORE_BITS = {False: 0.65, True: 1.4}
"""Bits of mantissa beyond those that follow from bits per weight, without and with calibration data, which make a
bit worth more. Chosen on training images: docs/method.md has the table."""


def is_norm(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor that is not a weight is part of a norm, or a bias. Other vectors may need every bit."""
    return len(shape) == 1 and name.split(".")[-1] in NORM_PARTS


def count_norm_values(tensors: Iterable[tuple[str, tuple[int, ...]]], are_folded: bool) -> int:
    """How many values of norms and biases are stored."""
    names = NORM_PARTS[:2] if are_folded else NORM_PARTS
    return sum(
        prod(shape) for name, shape in tensors if is_norm(name, shape) and name.split(".")[-1] in names
    )


def choose_norm_bits(values: int, weights: int, max_bytes: int, is_calibrated: bool) -> int:
    """Bits of mantissa of `values` norm values beside so many weights, in a file of `max_bytes`.

    A bit of mantissa quarters what rounding norms adds to the divergence, and a bit per weight what rounding
    weights adds. A bit is worth as much here as there where each value adds as much: D_norms / D = values / weights.
    So each bit per weight asks for one of mantissa, and a fourth of the values for one more.
    """
    if not values:
        return MOST_BITS
    bits = 8 * (max_bytes - values) / weights  # a value takes about a byte
    wanted = round(bits + log2(weights / values) / 2 + MORE_BITS[is_calibrated])
    return min(max(wanted, FEWEST_BITS), MOST_BITS)


def round_as(kept: Tensor, stored: Tensor) -> Tensor:
    """Trained values in the type of the stored ones, with no more bits of mantissa where those were rounded.

    Values that a person could have chosen, such as a norm's first ones, do not count as rounded, nor do random
    numbers of 22 bits.
    """
    kind = FLOAT_TYPES.get(stored.dtype)
    if kind is None or len(stored) < FEWEST_ROUNDED:
        return kept
    bits = used_bits(stored)
    is_rounded = FEWEST_BITS <= bits <= MOST_BITS and bits < kind.mantissa_bits
    return round_mantissas(kept, bits, stored.dtype) if is_rounded else kept
