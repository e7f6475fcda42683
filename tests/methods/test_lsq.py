"""Learned steps: the paper's start, and the paper's gradient in units that make its factor moot."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.methods import LSQ
from factorpack.tune.trainable import TrainableLevels, TrainableScalar
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_rounded, seeded

WEIGHT = seeded(5, 40)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("channels", [True, False])
def test_the_step_is_the_papers(bits: int, channels: bool) -> None:
    highest = 2 ** (bits - 1) - 1
    size = WEIGHT.abs().double()
    step = 2 * (size.mean(1, keepdim=True) if channels else size.mean()) / math.sqrt(highest)
    encoded = LSQ(bits, channels).encode(Weight(WEIGHT))
    assert_rounded(encoded.parts["scale"], step.reshape(-1, 1))
    stored = encoded.parts["scale"].double()
    codes = (WEIGHT.double() / stored).round().clamp(-highest - 1, highest)
    assert torch.equal(encoded.parts["codes"], codes.to(torch.int8))


@pytest.mark.parametrize("channels", [True, False])
def test_one_bit_is_a_sign_and_the_mean_size(channels: bool) -> None:
    encoded = LSQ(1, channels).encode(Weight(WEIGHT))
    size = WEIGHT.abs().mean(1, keepdim=True) if channels else WEIGHT.abs().mean()
    assert encoded.bits == {"codes": 1}
    assert_rounded(decode(encoded), WEIGHT.sign() * size)


def test_the_mean_size_is_the_best_step_for_signs() -> None:
    weight = WEIGHT.double()
    error = (decode(LSQ(1).encode(Weight(weight))) - weight).square().sum(1)
    for factor in (0.99, 1.01):
        other = weight.sign() * weight.abs().mean(1, keepdim=True) * factor
        assert ((other - weight).square().sum(1) > error).all()


def papers_step_gradient(numbers: Tensor, step: Tensor, bits: int, arriving: Tensor) -> Tensor:
    """Equation 3, summed over the numbers that share a step, times g = 1 / sqrt(N Q_P)."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    unit = numbers / step
    slope = unit.round() - unit
    slope = torch.where(unit <= lowest, lowest, torch.where(unit >= highest, highest, slope))
    return (arriving * slope).sum(1, keepdim=True) / math.sqrt(numbers.shape[1] * highest)


def moved(bits: int) -> TrainableScalar:
    """Some way into training, when numbers are no longer their codes."""
    trainable = TrainableScalar(LSQ(bits).encode(Weight(WEIGHT)))
    with torch.no_grad():
        trainable.rows.numbers.add_(0.03 * seeded(5, 40, seed=1))
        trainable.rows.growth.add_(0.05 * seeded(5, 1, seed=2))
    return trainable


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_steps_gradient_is_the_papers_but_for_its_factor_and_the_logarithm(bits: int) -> None:
    trainable = moved(bits)
    arriving = seeded(5, 40, seed=3)
    trainable().backward(arriving)
    rows = trainable.rows
    step = rows.stored_scale().detach()
    papers = papers_step_gradient(rows.values().detach(), step, bits, arriving)
    g = 1 / math.sqrt(40 * (2 ** (bits - 1) - 1))
    assert rows.growth.grad is not None
    learned = (rows.first_scale * rows.growth.exp()).detach()  # d step / d growth
    assert_close(rows.growth.grad, papers / g * learned)


def trained(factor: float, steps: int = 25) -> TrainableScalar:
    trainable = moved(3)
    trainable.rows.growth.register_hook(lambda gradient: gradient * factor)
    optimizer = torch.optim.Adam(trainable.parameters(), lr=3e-3)
    target = seeded(5, 40, seed=4)
    for _ in range(steps):
        optimizer.zero_grad()
        (trainable() - target).square().sum().backward()
        optimizer.step()
    return trainable


def test_adam_makes_the_papers_factor_moot() -> None:
    """Powers of two, so that not even rounding differs; Adam's epsilon is the rest."""
    plain, scaled = trained(1.0), trained(2.0**-4)
    start = moved(3).rows.growth
    assert (plain.rows.growth - start).abs().max() > 0.01
    difference = (plain.rows.growth - scaled.rows.growth).abs().max()
    assert difference < 1e-5 * (plain.rows.growth - start).abs().max()
    assert torch.equal(plain.encoded().parts["codes"], scaled.encoded().parts["codes"])


def test_one_bit_trains_too() -> None:
    trainable = TrainableLevels(LSQ(1).encode(Weight(WEIGHT)))
    optimizer = torch.optim.Adam(trainable.parameters(), lr=3e-3)
    target = seeded(5, 40, seed=4)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (trainable() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = trainable.encoded()
    assert losses[-1] < 0.7 * losses[0]
    assert set(after.parts["codes"].unique().tolist()) == {-1, 0}


@pytest.mark.parametrize("bits", [0, 9])
def test_impossible_settings(bits: int) -> None:
    with pytest.raises(PlanError, match=f"bits is {bits}, allowed are 1 to 8"):
        LSQ(bits)
