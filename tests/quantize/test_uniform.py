"""Signed uniform codes, against their definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.quantize import uniform
from factorpack.quantize.uniform import (
    Clip,
    check_bits,
    code_range,
    code_width,
    fit_scale,
    from_codes,
    minmax_scale,
    mse_scale,
    storable,
    storable_alone,
    to_codes,
)
from tests.helpers import assert_close, seeded, tolerance

BITS = range(uniform.MIN_BITS, uniform.MAX_BITS + 1)
CLIPS: tuple[Clip, ...] = ("mse", "minmax")

bits_of = st.integers(uniform.MIN_BITS, uniform.MAX_BITS)
matrices = st.tuples(st.integers(1, 5), st.integers(1, 60), st.integers(0, 1000), st.integers(-60, 60)).map(
    lambda drawn: seeded(drawn[0], drawn[1], seed=drawn[2]) * 2.0 ** drawn[3]
)


def reference(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    """clamp(round(x / s)) s, number by number in Python's floats; a scale of zero means zero."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    values = [
        [min(max(round(x / s), low), high) * s if s > 0 else 0.0 for x in row]
        for row, (s,) in zip(rows.tolist(), scale.tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64)


def squared_error(rows: Tensor, scale: Tensor, bits: int) -> Tensor:
    return (reference(rows, scale, bits) - rows.double()).square().sum(1)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_twos_complement(bits: int) -> None:
    low, high = code_range(bits)
    assert high - low + 1 == 2**bits
    assert low == -high - 1


@pytest.mark.parametrize("bits", [uniform.MIN_BITS - 1, uniform.MAX_BITS + 1, 0, -3])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(PlanError, match=f"depth is {bits}, allowed are 2 to 8"):
        check_bits("depth", bits)


@given(matrices, bits_of, st.sampled_from(CLIPS))
def test_codes_stay_in_range_and_zero_stays_zero(rows: Tensor, bits: int, clip: Clip) -> None:
    rows = torch.cat([rows, torch.zeros(len(rows), 1)], 1)
    scale = fit_scale(rows, bits, clip)
    codes = to_codes(rows, scale, bits)
    low, high = code_range(bits)
    assert codes.dtype == torch.int8
    assert low <= codes.min() <= codes.max() <= high
    assert codes[:, -1].eq(0).all()
    assert from_codes(codes, scale)[:, -1].eq(0).all()


@given(matrices, bits_of, st.sampled_from(CLIPS))
def test_codes_match_the_float64_reference(rows: Tensor, bits: int, clip: Clip) -> None:
    """Exactly, but for numbers so near the middle of two codes that FP32 division may go either way."""
    scale = fit_scale(rows, bits, clip)
    codes = to_codes(rows, scale, bits).double()
    expected = reference(rows, scale, bits) / scale.double()
    middle = (rows.double() / scale.double()).frac().abs().sub(0.5).abs() < tolerance(torch.float32)
    assert (codes.eq(expected.round()) | middle).all()


@given(matrices, bits_of, st.sampled_from(CLIPS))
def test_quantizing_twice_changes_nothing(rows: Tensor, bits: int, clip: Clip) -> None:
    scale = fit_scale(rows, bits, clip)
    codes = to_codes(rows, scale, bits)
    assert torch.equal(to_codes(from_codes(codes, scale), scale, bits), codes)


@given(matrices, bits_of)
def test_minmax_clips_nothing_and_errs_by_half_a_step(rows: Tensor, bits: int) -> None:
    scale = minmax_scale(rows.double(), bits)
    low, high = code_range(bits)
    unit = rows.double() / scale
    slack = 1 + tolerance(torch.float64)
    assert low * slack <= unit.min()
    assert unit.max() <= high * slack
    error = (from_codes(to_codes(rows.double(), scale, bits), scale) - rows).abs()
    assert (error <= scale / 2 * slack).all()


@given(matrices, bits_of)
def test_minmax_is_the_smallest_such_scale(rows: Tensor, bits: int) -> None:
    """One end of every row lies on an end of the code range."""
    low, high = code_range(bits)
    scale = minmax_scale(rows.double(), bits)
    ends = torch.stack([rows.double().amax(1) / high, rows.double().amin(1) / low]).amax(0).clamp_min(0)
    assert torch.equal(scale[:, 0], ends)


@given(matrices, bits_of, st.sampled_from(CLIPS))
def test_inside_the_range_the_error_is_at_most_half_a_step(rows: Tensor, bits: int, clip: Clip) -> None:
    scale = fit_scale(rows, bits, clip).double()
    low, high = code_range(bits)
    inside = (rows >= (low - 0.5) * scale) & (rows <= (high + 0.5) * scale)
    error = (from_codes(to_codes(rows, scale, bits), scale) - rows).abs()
    assert (error <= scale / 2 * (1 + tolerance(torch.float32)))[inside].all()


@given(matrices, bits_of)
def test_mse_is_the_best_of_every_scale_it_tried(rows: Tensor, bits: int) -> None:
    """The min-max scale is among them."""
    rows = rows.double()
    start = minmax_scale(rows, bits)
    found = squared_error(rows, mse_scale(rows, bits, start), bits)
    assert uniform._COARSE[0] == 1.0
    for shrink in uniform._COARSE:
        assert (found <= squared_error(rows, start * shrink, bits) * (1 + tolerance(torch.float64))).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_mse_gains_on_heavy_tails(bits: int) -> None:
    rows = seeded(20, 500).pow(3)
    start = minmax_scale(rows, bits)
    assert (squared_error(rows, mse_scale(rows, bits, start), bits) < squared_error(rows, start, bits)).all()


@given(matrices, bits_of, st.integers(-100, 60), st.sampled_from(CLIPS))
def test_powers_of_two_change_scales_and_nothing_else(
    rows: Tensor, bits: int, power: int, clip: Clip
) -> None:
    """The search cannot depend on the unit: neither overflow nor underflow may decide it."""
    rows = rows / rows.abs().max()
    start = minmax_scale(rows, bits)
    far = rows * 2.0**power
    far_start = minmax_scale(far, bits)
    assert torch.equal(far_start, start * 2.0**power)
    if clip == "mse":
        assert torch.equal(mse_scale(far, bits, far_start), mse_scale(rows, bits, start) * 2.0**power)
    assert torch.equal(to_codes(far, far_start, bits), to_codes(rows, start, bits))


@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e-40])
@pytest.mark.parametrize("clip", CLIPS)
def test_numbers_below_fp32s_normal_range_still_get_codes(size: float, clip: Clip) -> None:
    """A step of 2^-149 is as fine as FP32 gets, so that is allowed for on top of half a step."""
    rows = seeded(3, 200) * size
    scale = fit_scale(rows, 8, clip)
    error = (from_codes(to_codes(rows, scale, 8), scale).double() - rows.double()).abs()
    inside = (rows <= 127.5 * scale) & (rows >= -128.5 * scale)
    assert (error <= scale.double() / 2 * (1 + tolerance(torch.float32)) + 128 * 2.0**-149)[inside].all()
    assert inside.all() or clip == "mse"


@pytest.mark.parametrize("clip", CLIPS)
def test_a_dead_row_gets_scale_zero_and_zeros(clip: Clip) -> None:
    rows = seeded(3, 10)
    rows[1] = 0
    scale = fit_scale(rows, 4, clip)
    assert scale[1].item() == 0.0
    assert to_codes(rows, scale, 4)[1].eq(0).all()
    assert from_codes(to_codes(rows, scale, 4), scale).isfinite().all()


def test_a_scale_that_fp16_rounds_to_zero_gives_zeros() -> None:
    rows = torch.cat([seeded(1, 10), seeded(1, 10) * 1e-9])
    scale = fit_scale(rows, 4)
    assert scale[1].item() == 0.0
    assert to_codes(rows, scale, 4)[1].eq(0).all()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rows_of_one_sign(clip: Clip, sign: float) -> None:
    rows = seeded(4, 50).abs() * sign
    scale = fit_scale(rows, 8, clip).double()
    assert (scale > 0).all()
    assert ((from_codes(to_codes(rows, scale, 8), scale) - rows).abs() <= scale).all()


def test_rows_without_numbers() -> None:
    assert fit_scale(torch.empty(3, 0), 4).tolist() == [[0.0]] * 3
    assert fit_scale(torch.empty(0, 5), 4).shape == (0, 1)


@pytest.mark.parametrize(
    ("scales", "dtype"),
    [
        ([1.0, 0.5], torch.float16),
        ([65504.0], torch.float16),
        ([65505.0], torch.float32),  # beyond FP16's largest
        ([2.0**-16], torch.float16),
        ([2.0**-17], torch.float32),  # FP16 would round it by more than 2^-9
        ([1.0, 2.0**-19], torch.float32),
        ([1.0, 2.0**-21], torch.float16),  # too small beside the largest to matter
        ([0.0, 0.0], torch.float16),
        ([0.0, 1e-3], torch.float16),
        ([], torch.float16),
        ([-1.0, 0.5], torch.float16),
        ([-65505.0, 1.0], torch.float32),  # levels have signs
        ([-(2.0**-17)], torch.float32),
    ],
)
def test_scales_are_fp16_where_fp16_can_hold_them(scales: list[float], dtype: torch.dtype) -> None:
    assert storable(torch.tensor(scales).reshape(-1, 1)).dtype == dtype


@given(st.floats(2.0**-16, 65504.0))
def test_an_fp16_scale_is_within_one_part_in_512(value: float) -> None:
    stored = storable(torch.tensor([[value]], dtype=torch.float64))
    assert stored.dtype == torch.float16
    assert math.isclose(stored.item(), value, rel_tol=2.0**-9)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32, torch.float64])
def test_numbers_are_codes_times_scales_in_at_least_fp32(scale_dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128).to(torch.int8).reshape(2, 128)
    scale = seeded(2, 1).abs().to(scale_dtype)
    values = from_codes(codes, scale)
    assert values.dtype == torch.promote_types(scale_dtype, torch.float32)
    assert_close(values, codes.double() * scale.double())


@pytest.mark.parametrize("bits", range(9, uniform.MAX_STORED_BITS + 1))
def test_wide_codes_are_int16_and_reach_both_ends(bits: int) -> None:
    low, high = code_range(bits)
    rows = torch.tensor([[0.0, low - 5.0, high + 5.0, 3.4]])
    codes = to_codes(rows, torch.ones(1, 1), bits)
    assert codes.dtype == torch.int16
    assert codes.tolist() == [[0, low, high, 3]]


@pytest.mark.parametrize(("low", "high", "bits"), [(-1, 0, 1), (-2, 1, 2), (0, 1, 2), (-3, 1, 3), (5, 9, 5)])
def test_the_width_codes_need(low: int, high: int, bits: int) -> None:
    assert code_width(low, high) == bits


def test_scales_stored_each_by_itself_have_the_same_values_at_once() -> None:
    scales = torch.tensor(
        [0.0, -0.0, 1e-30, 2.0**-16, 2.0**-16 * 0.99, 0.1, -0.3, 65504.0, 65505.0, 1e30, torch.inf]
    )
    expected = torch.cat([storable(each.reshape(1)).float() for each in scales])
    assert torch.equal(storable_alone(scales), expected)
    assert storable_alone(scales).dtype == torch.float32
