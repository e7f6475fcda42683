"""Rounding for training: forward is the stored number exactly, backward is the theory's gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorpack.quantize.straight_through import fake_quantize, straight_through
from factorpack.quantize.uniform import code_range, fit_scale, from_codes, to_codes
from tests.helpers import assert_close, assert_same_tensor, seeded


def spread(bits: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Rows well inside, across and far beyond the range of their codes, and scales over many decades."""
    scale = torch.tensor([[1e-3], [0.25], [1.0], [37.0]], dtype=dtype)
    return seeded(4, 200, dtype=dtype) * scale * code_range(bits)[1], scale


def zones(rows: Tensor, scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Where x / s is inside the clamp, and the codes by their definition; no number is on an edge."""
    low, high = code_range(bits)
    unit = rows / scale
    assert not (unit == low).any()
    assert not (unit == high).any()
    inside = (unit > low) & (unit < high)
    assert inside.any()
    assert (~inside).any()
    return inside, unit.round().clamp(low, high)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_is_what_the_file_would_hold(bits: int, dtype: torch.dtype) -> None:
    rows, _ = spread(bits, dtype)
    scale = fit_scale(rows, bits).to(dtype)
    assert torch.equal(fake_quantize(rows, scale, bits), from_codes(to_codes(rows, scale, bits), scale))


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e20])
def test_forward_at_the_ends_of_what_a_scale_can_be(scale: float) -> None:
    rows = seeded(3, 50) * 4 * scale
    shared = torch.full((3, 1), scale)
    codes = to_codes(rows, shared, 4)
    assert codes.any() or scale == 0
    assert torch.equal(fake_quantize(rows, shared, 4), from_codes(codes, shared))


def test_ties_go_where_the_file_s_rounding_sends_them() -> None:
    halves = torch.tensor([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]])
    assert fake_quantize(halves, torch.ones(1, 1), 4).tolist() == [[-2.0, -2.0, 0.0, 0.0, 2.0, 2.0]]


@pytest.mark.parametrize("share", [1.0, 0.37, 1e-3, 1e-9])
def test_straight_through_is_the_rounded_number_to_the_last_bit(share: float) -> None:
    """Also where the value that learns is far from the one that counts."""
    rounded = seeded(1000)
    value = (rounded * share).requires_grad_()
    through = straight_through(value, rounded)
    assert_same_tensor(through.detach(), rounded)
    (gradient,) = torch.autograd.grad(through, value, seeded(1000, seed=1))
    assert_same_tensor(gradient, seeded(1000, seed=1))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_gradient_passes_inside_the_clamp_and_stops_outside(bits: int) -> None:
    rows, scale = spread(bits)
    inside, _ = zones(rows, scale, bits)
    arriving = seeded(4, 200, dtype=torch.float64, seed=1)
    rows.requires_grad_()
    (gradient,) = torch.autograd.grad(fake_quantize(rows, scale, bits), rows, arriving)
    assert_close(gradient, arriving * inside)
    assert not gradient[~inside].any()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_scale_s_gradient_is_learned_step_quantization_s(bits: int) -> None:
    """Esser et al., equation 3: round(x/s) - x/s inside, the lowest or highest code outside."""
    rows, scale = spread(bits)
    inside, codes = zones(rows, scale, bits)
    arriving = seeded(4, 200, dtype=torch.float64, seed=1)
    scale.requires_grad_()
    (gradient,) = torch.autograd.grad(fake_quantize(rows, scale, bits), scale, arriving)
    slope = torch.where(inside, codes - rows / scale.detach(), codes)
    assert_close(gradient, (arriving * slope).sum(1, keepdim=True))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_numbers_that_are_their_codes_do_not_pull_at_the_scale(bits: int) -> None:
    """q - x/s is zero for each of them: not even rounding noise is left, of which Adam makes whole steps."""
    scale = seeded(6, 1).abs().half().float().requires_grad_()
    codes = torch.arange(*code_range(bits)).expand(6, -1)  # times FP16, exact in FP32
    rows = from_codes(codes, scale.detach())
    (gradient,) = torch.autograd.grad(fake_quantize(rows, scale, bits), scale, seeded(*rows.shape, seed=1))
    assert not gradient.any()


def test_a_row_without_a_scale_is_zero_and_its_gradients_finite() -> None:
    rows, scale = seeded(2, 5).requires_grad_(), torch.tensor([[0.0], [1.0]], requires_grad=True)
    quantized = fake_quantize(rows, scale, 3)
    assert not quantized[0].any()
    for gradient in torch.autograd.grad(quantized.sum(), [rows, scale]):
        assert gradient.isfinite().all()
