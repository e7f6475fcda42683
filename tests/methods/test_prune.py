"""Magnitude pruning: the smallest weights go, as many as asked for, and stay gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import factorpack as fp
from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.methods import Prune
from factorpack.quantize.uniform import fit_scale, from_codes, to_codes
from factorpack.size import ITEMS, fixed_bits
from factorpack.tune.trainable import TrainableScalar
from factorpack.weight import Weight
from tests.helpers import assert_same_tensor, seeded

WEIGHT = seeded(12, 50, dtype=torch.float64)


@given(st.floats(0.0, 1.0, exclude_max=True), st.integers(2, 8))
def test_the_smallest_share_is_zero_and_the_rest_is_rounded_to_nearest(sparsity: float, bits: int) -> None:
    encoded = Prune(sparsity, bits).encode(Weight(WEIGHT))
    gone = round(sparsity * WEIGHT.numel())
    order = WEIGHT.abs().flatten().argsort()
    pruned = WEIGHT.flatten().clone()
    pruned[order[:gone]] = 0.0
    rows = pruned.reshape(12, 50)
    scale = fit_scale(rows, bits)
    assert_same_tensor(encoded.parts["scale"], scale)
    assert torch.equal(decode(encoded), from_codes(to_codes(rows, scale, bits), scale).double())
    assert encoded.extra_zeros == gone


def test_what_is_lost_is_the_energy_of_the_smallest() -> None:
    """And, at eight bits, next to nothing else."""
    lost = (decode(Prune(0.7).encode(Weight(WEIGHT))) - WEIGHT).square().sum()
    expected = WEIGHT.square().flatten().sort().values[:420].sum()
    assert expected <= lost <= 1.01 * expected


def test_ties_are_cut_to_the_exact_count() -> None:
    encoded = Prune(0.25).encode(Weight(torch.ones(4, 6)))
    assert int(encoded.parts["codes"].count_nonzero()) == 18


def test_a_share_and_not_a_threshold_a_channel() -> None:
    """A faint channel goes whole, and then has no scale."""
    weight = torch.cat([torch.full((1, 10), 1e-6), torch.ones(3, 10)])
    encoded = Prune(0.25).encode(Weight(weight))
    assert encoded.parts["scale"].flatten().tolist()[0] == 0.0
    assert decode(encoded)[0].eq(0).all()
    assert decode(encoded)[1:].ne(0).all()


def test_its_fixed_width_is_a_mask_and_the_codes_that_are_left() -> None:
    encoded = Prune(0.9, 8).encode(Weight(WEIGHT))
    left = int(encoded.parts["codes"].count_nonzero())
    expected = dict.fromkeys(ITEMS, 0) | {"mask": 600, "latent": 8 * left, "scales": 12 * 16}
    assert left <= 60
    assert fixed_bits(encoded) == expected
    assert fixed_bits(Prune(0.1, 8).encode(Weight(WEIGHT)))["mask"] == 0  # would cost 600 bits to save 480


def test_zeros_stay_zero_in_training() -> None:
    encoded = Prune(0.5, 4).encode(Weight(WEIGHT))
    zeros = encoded.parts["codes"] == 0
    trainable = TrainableScalar(encoded)
    with torch.no_grad():
        trainable.rows.numbers.add_(0.3 * seeded(12, 50, seed=1))
    trainable().sum().backward()
    after = trainable.encoded()
    assert not after.parts["codes"][zeros].any()
    assert not torch.equal(after.parts["codes"], encoded.parts["codes"])
    assert after.extra_zeros == encoded.extra_zeros == 300
    gradient = trainable.rows.numbers.grad
    assert gradient is not None
    assert not gradient[zeros].any()


def test_fine_codes_train_as_fast_as_coarse_ones() -> None:
    """What is left must make up for what is gone, and 8-bit codes are 16 times closer together."""
    moves = []
    for bits in (4, 8):
        trainable = TrainableScalar(Prune(0.5, bits).encode(Weight(WEIGHT.float())))
        before = trainable().detach()
        optimizer = torch.optim.Adam(trainable.parameters(), lr=3e-3)
        for _ in range(20):
            optimizer.zero_grad()
            trainable().backward(seeded(12, 50, seed=1))
            optimizer.step()
        moves.append((trainable().detach() - before).norm().item())
    assert 0.5 < moves[1] / moves[0] < 2.0


def test_nothing_pruned_may_leave_zero() -> None:
    encoded = Prune(0.0, 2).encode(Weight(WEIGHT))
    assert encoded.extra_zeros == 0
    assert TrainableScalar(encoded).rows.mask is None
    assert torch.equal(encoded.parts["codes"], fp.Scalar(2).encode(Weight(WEIGHT)).parts["codes"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, "sparsity is 1.0, allowed are 0 up to but not 1"),
        ({"sparsity": -0.1}, "sparsity is -0.1, allowed are 0 up to but not 1"),
        ({"sparsity": "much"}, "sparsity is 'much', a str; expected float or int"),
        ({"bits": 9}, "bits is 9, allowed are 2 to 8"),
        ({"bits": True}, "bits is True, a bool; expected int"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Prune(**settings)
