"""Sums of sign matrices, against the matrices themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.methods import ABCNet
from factorpack.size import fixed_bits, words
from factorpack.weight import Weight
from tests.helpers import assert_rounded, seeded

BASES = range(1, 6)
WEIGHT = seeded(7, 60, dtype=torch.float64) + 0.3
SKEWED = WEIGHT.exp()


def explicit(row: Tensor, bases: int) -> Tensor:
    """sum_i a_i B_i by the paper's equations 1 to 3: M sign vectors, and regression on them."""
    shifts = [-1 + 2 * i / (bases - 1) for i in range(bases)] if bases > 1 else [0.0]
    centred = row - row.mean()
    signs = torch.stack([torch.where(centred + u * row.std(correction=0) >= 0, 1.0, -1.0) for u in shifts], 1)
    factors = torch.linalg.lstsq(signs.double(), row[:, None], driver="gelsd").solution
    return (signs.double() @ factors).flatten()


@pytest.mark.parametrize(
    "weight", [WEIGHT, SKEWED, -SKEWED], ids=["normal", "skewed", "skewed the other way"]
)
@pytest.mark.parametrize("bases", BASES)
def test_levels_are_the_sums_of_the_signs(weight: Tensor, bases: int) -> None:
    expected = explicit(weight.flatten(), bases).reshape(weight.shape)
    encoded = ABCNet(bases).encode(Weight(weight))
    assert encoded.parts["levels"].shape == (1, bases + 1)
    assert_rounded(decode(encoded), expected)
    assert len(decode(encoded).unique()) == len(expected.unique())


@pytest.mark.parametrize("bases", BASES)
def test_channels_have_sums_of_their_own(bases: int) -> None:
    encoded = ABCNet(bases, channels=True).encode(Weight(SKEWED))
    assert encoded.parts["levels"].shape == (7, bases + 1)
    assert_rounded(decode(encoded), torch.stack([explicit(row, bases) for row in SKEWED]))


def test_one_basis_is_the_mean_size_of_a_centred_weight() -> None:
    """For M = 1 regression on signs gives mean|w|, where the mean is zero."""
    weight = torch.cat([WEIGHT, -WEIGHT])
    assert_rounded(decode(ABCNet(1).encode(Weight(weight))), weight.sign() * weight.abs().mean())


@pytest.mark.parametrize(("bases", "width"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_it_packs_tighter_than_a_bit_a_basis(bases: int, width: int) -> None:
    encoded = ABCNet(bases).encode(Weight(WEIGHT))
    assert encoded.bits == {"codes": width}
    assert fixed_bits(encoded)["latent"] == 420 * width
    assert fixed_bits(encoded)["scales"] == 16 * (bases + 1)
    assert words(encoded) == f"{bases + 1} levels"


def test_equal_weights_have_one_level() -> None:
    assert_rounded(decode(ABCNet(3).encode(Weight(torch.full((3, 4), 0.7)))), torch.full((3, 4), 0.7))


@pytest.mark.parametrize("bases", [0, 6])
def test_impossible_settings(bases: int) -> None:
    with pytest.raises(PlanError, match=f"bases is {bases}, allowed are 1 to 5"):
        ABCNet(bases)
