"""One step a tensor, and codes that weigh their bits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.format.streams import encode_part
from factorpack.methods import RDOQ
from factorpack.weight import Weight
from tests.helpers import relative_error, seeded

WEIGHT = seeded(64, 96)
RMS = WEIGHT.double().square().mean().sqrt().item()


@pytest.mark.parametrize("step", [0.1, 0.5, 2.0])
def test_without_a_price_codes_are_the_nearest(step: float) -> None:
    encoded = RDOQ(step, price=0.0).encode(Weight(WEIGHT))
    stored = encoded.parts["scale"]
    assert stored.shape == (1, 1)
    assert stored.item() == torch.tensor(step * RMS).half().item()
    assert torch.equal(encoded.parts["codes"], (WEIGHT / stored.float()).round().to(torch.int8))


@pytest.mark.parametrize(
    ("qp", "step"), [(0, 1.0), (-1, 0.875), (-2, 0.75), (-4, 0.5), (-9, 0.21875), (2, 1.5), (-16, 0.0625)]
)
def test_the_steps_of_the_standard(qp: int, step: float) -> None:
    """(4 + qp mod 4) quarters of a power of two."""
    assert RDOQ(qp=qp).encode(Weight(WEIGHT)).parts["scale"].item() == step


def bits(encoded_price: float, step: float = 0.3) -> int:
    codes = RDOQ(step, price=encoded_price).encode(Weight(WEIGHT)).parts["codes"]
    return 8 * len(encode_part(codes, 8)[1])


def test_a_price_makes_files_smaller_and_weights_worse() -> None:
    prices = (0.0, 0.05, 0.1, 0.3)
    errors = [
        relative_error(decode(RDOQ(0.3, price=price).encode(Weight(WEIGHT))), WEIGHT) for price in prices
    ]
    sizes = [bits(price) for price in prices]
    assert all(less < more for more, less in pairwise(sizes))
    assert all(good < worse for good, worse in pairwise(errors))


def test_codes_go_to_the_nearest_or_one_nearer_to_zero() -> None:
    encoded = RDOQ(0.4, price=0.2).encode(Weight(WEIGHT))
    nearest = (WEIGHT / encoded.parts["scale"].float()).round()
    moved = nearest - encoded.parts["codes"]
    assert moved.any()
    assert bool(((moved == 0) | (moved == nearest.sign())).all())


def test_a_step_too_fine_for_a_file() -> None:
    with pytest.raises(PlanError, match="expected a step at which 16 bits do"):
        RDOQ(1e-5).encode(Weight(WEIGHT))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "step is None and qp None: give exactly one of them"),
        ({"step": 0.1, "qp": -30}, "step is 0.1 and qp -30: give exactly one of them"),
        ({"step": 0.0}, "step is 0.0, expected a number above 0"),
        ({"step": float("inf")}, "step is inf, expected a number above 0"),
        ({"step": "fine"}, "step is 'fine', a str; expected float or int"),
        ({"qp": 0.5}, "qp is 0.5, a float; expected int"),
        ({"qp": 501}, "qp is 501, allowed are -500 to 500"),
        ({"step": 1.0, "price": -1.0}, "price is -1.0, expected a number from 0 up"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        RDOQ(**settings)
