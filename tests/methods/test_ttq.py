"""Three levels: a threshold, two means, and the gradients the paper gives them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.methods import TTQ
from factorpack.tune.trainable import TrainableLevels
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_rounded, seeded

WEIGHT = seeded(6, 40) + 0.2


def by_the_paper(weight: Tensor, threshold: float) -> Tensor:
    """Equation 6 with the means of what lies beyond, in float64."""
    wide = weight.double()
    edge = threshold * wide.abs().max()
    result = torch.zeros_like(wide)
    for beyond in (wide > edge, wide < -edge):
        if beyond.any():
            result[beyond] = wide[beyond].mean()
    return result


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3, 0.9])
def test_the_weights_are_the_papers(threshold: float) -> None:
    encoded = TTQ(threshold).encode(Weight(WEIGHT))
    assert encoded.parts["levels"].shape == (1, 3)
    assert_rounded(decode(encoded), by_the_paper(WEIGHT, threshold))
    assert set(encoded.parts["codes"].unique().tolist()) <= {-1, 0, 1}


def test_channels_have_thresholds_and_levels_of_their_own() -> None:
    scaled = WEIGHT * torch.logspace(-2, 2, 6)[:, None]
    encoded = TTQ(0.3, channels=True).encode(Weight(scaled))
    assert encoded.parts["levels"].shape == (6, 3)
    assert_rounded(decode(encoded), torch.stack([by_the_paper(row, 0.3) for row in scaled]))


def test_weights_of_one_sign_have_one_level_that_is_used() -> None:
    encoded = TTQ().encode(Weight(WEIGHT.abs() + 1.0))
    assert encoded.parts["levels"][0, :2].tolist() == [0.0, 0.0]
    assert encoded.parts["codes"].eq(1).all()


def test_means_are_the_best_levels_for_their_codes() -> None:
    encoded = TTQ(0.2).encode(Weight(WEIGHT.double()))
    error = (decode(encoded) - WEIGHT.double()).square().sum()
    for index in (0, 2):
        for factor in (0.99, 1.01):
            levels = encoded.parts["levels"].clone()
            levels[0, index] *= factor
            other = levels.double()[0][encoded.parts["codes"].long() + 1]
            assert (other - WEIGHT.double()).square().sum() > error


def test_gradients_are_the_papers() -> None:
    """Scales: sums over their weights. Weights: scaled by W_p, 1 and W_n (its equations 7 and 8)."""
    encoded = TTQ(0.3).encode(Weight(WEIGHT))
    trainable = TrainableLevels(encoded)
    arriving = seeded(6, 40, seed=1)
    trainable().backward(arriving)
    codes, levels = encoded.parts["codes"], encoded.parts["levels"].float()
    shares, numbers = trainable.rows.shares.grad, trainable.rows.numbers.grad
    assert shares is not None
    assert numbers is not None
    to_levels = torch.stack([arriving[codes == code].sum() for code in (-1, 0, 1)])[None]
    to_levels[0, 1] = 0.0
    assert_close(shares, to_levels * trainable.rows.level_unit)
    factor = torch.where(codes > 0, levels[0, 2], torch.where(codes < 0, -levels[0, 0], 1.0))
    assert_close(numbers, arriving * factor * 32)  # numbers are in 32nds of a code


def test_the_zero_level_stays_zero_and_weights_change_their_level() -> None:
    encoded = TTQ(0.3).encode(Weight(WEIGHT))
    trainable = TrainableLevels(encoded)
    target = seeded(6, 40, seed=2)
    optimizer = torch.optim.Adam(trainable.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (trainable() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = trainable.encoded()
    assert losses[-1] < 0.5 * losses[0]
    assert after.parts["levels"][0, 1] == 0.0
    assert not torch.equal(after.parts["levels"], encoded.parts["levels"])
    assert not torch.equal(after.parts["codes"], encoded.parts["codes"])
    assert after.parts["codes"].abs().max() == 1


@pytest.mark.parametrize("threshold", [-0.1, 1.0, float("nan")])
def test_impossible_thresholds(threshold: float) -> None:
    with pytest.raises(PlanError, match="allowed are 0 up to but not 1"):
        TTQ(threshold)


def test_settings_of_another_type() -> None:
    with pytest.raises(PlanError, match="channels is 1, a int; expected bool"):
        TTQ(channels=1)  # type: ignore[arg-type]
