"""Curves and the allocation on them: exact where theory gives the numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factorpack.budget.curves import Curve, allocate, load_curves, save_curves
from factorpack.errors import FormatError, PlanError
from tests.helpers import flipped

STEPS = [0.5 * 2.0**octave for octave in range(5)]
CURVE = Curve(STEPS, [1000, 800, 500, 200, 100], [0.1, 0.3, 0.9, 2.0, 3.0], 1600, 1, 1.0)


@pytest.mark.parametrize("index", range(5))
def test_at_its_own_steps_a_curve_is_what_was_measured(index: int) -> None:
    assert CURVE.bytes_at(STEPS[index]) == pytest.approx(CURVE.bytes[index])


@given(place=st.floats(0, 1), index=st.integers(0, 3))
def test_between_steps_it_is_straight_in_octaves(place: float, index: int) -> None:
    step = STEPS[index] * 2.0**place
    left, right = CURVE.bytes[index : index + 2]
    assert CURVE.bytes_at(step) == pytest.approx(left + place * (right - left))


@given(halvings=st.floats(0, 20))
def test_below_the_finest_step_a_halving_costs_a_bit_a_weight(halvings: float) -> None:
    step = STEPS[0] / 2.0**halvings
    assert CURVE.bytes_at(step) == pytest.approx(1000 + 200 * halvings)


@given(factor=st.floats(1, 1e9))
def test_above_the_coarsest_nothing_changes(factor: float) -> None:
    assert CURVE.bytes_at(STEPS[-1] * factor) == 100


def curve(scale: float, numel: int, unit: float) -> Curve:
    """A weight of this spread whose codes take log2(4 spread / step) bits, and 5 bytes when all are zero."""
    steps = [scale * 2.0**octave for octave in range(-4, 3)]
    bits = [max(2 - octave, 0) for octave in range(-4, 3)]
    return Curve(steps, [5 + numel * each // 8 for each in bits], [step**2 for step in steps], numel, 1, unit)


CURVES = {"a": curve(1.0, 8000, 0.3), "b": curve(0.01, 64_000, 0.02), "c": curve(30.0, 800, 5.0)}
LEAST = 15.0


@given(budget=st.floats(LEAST + 1, 3e5))
def test_a_budget_is_met_by_steps_of_equal_slope(budget: float) -> None:
    steps = allocate(CURVES, budget)
    assert list(steps) == list(CURVES)
    total = sum(CURVES[name].bytes_at(step) for name, step in steps.items())
    assert total <= budget
    assert total == pytest.approx(budget, rel=1e-6)
    multipliers = [step / CURVES[name].step_at_unit_slope for name, step in steps.items()]
    assert multipliers == pytest.approx([multipliers[0]] * 3)


@given(budget=st.floats(LEAST + 1, 1e6), more=st.floats(1.01, 10))
def test_a_larger_budget_never_makes_a_step_coarser(budget: float, more: float) -> None:
    tight, loose = allocate(CURVES, budget), allocate(CURVES, budget * more)
    assert all(loose[name] <= tight[name] * (1 + 1e-9) for name in CURVES)


@pytest.mark.parametrize("unit", [1e-20, 1e-6, 1e6, 1e15])
def test_the_unit_of_the_slope_does_not_matter(unit: float) -> None:
    """Sensitivities may be tiny in all layers alike: what counts is how they compare."""
    scaled = {
        name: Curve(c.steps, c.bytes, c.losses, c.numel, c.tile, c.step_at_unit_slope * unit)
        for name, c in CURVES.items()
    }
    expected, found = allocate(CURVES, 20_000.0), allocate(scaled, 20_000.0)
    for name in CURVES:
        assert found[name] == pytest.approx(expected[name], rel=1e-6)


def test_the_least_that_can_be_met_and_one_less() -> None:
    assert all(math.isfinite(step) for step in allocate(CURVES, LEAST).values())
    with pytest.raises(PlanError, match="the weights take 15 bytes at least, and 14 are left for them"):
        allocate(CURVES, LEAST - 1)


def test_a_budget_larger_than_anything_is_met_by_fine_steps() -> None:
    steps = allocate(CURVES, 1e9)
    assert all(step > 0 for step in steps.values())
    assert sum(CURVES[name].bytes_at(step) for name, step in steps.items()) <= 1e9


def test_a_file_without_curves_is_named_in_few_words(tmp_path: Path) -> None:
    """Not with all its content."""
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"\x90\x01" * 6_000_000)
    with pytest.raises(
        PlanError, match=r"holds no curves: it begins with .*; remove it or name another"
    ) as caught:
        load_curves(file, "mark")
    assert len(str(caught.value)) < 300 + len(str(file))
    assert file.stat().st_size == 12_000_000


def test_curves_that_are_damaged_are_told_from_other_files(tmp_path: Path) -> None:
    save_curves(tmp_path / "curves", CURVES, "mark")
    assert load_curves(tmp_path / "curves", "mark") == CURVES
    whole = (tmp_path / "curves").read_bytes()
    (tmp_path / "curves").write_bytes(flipped(whole, 4 * len(whole)))
    with pytest.raises(FormatError, match="curves: the checksum does not match"):
        load_curves(tmp_path / "curves", "mark")


def test_the_nearest_step_is_so_in_octaves() -> None:
    one = CURVES["a"]
    for place, step in enumerate(one.steps):
        assert one.nearest(step) == one.nearest(1.3 * step) == one.nearest(step / 1.3) == place
    assert one.nearest(one.steps[0] / 100) == 0
    assert one.nearest(one.steps[-1] * 100) == len(one.steps) - 1


def test_the_loss_between_steps_is_interpolated_in_octaves() -> None:
    curve = Curve([1.0, 2.0, 8.0], [300, 200, 100], [1.0, 4.0, 16.0], 800, 1, 1.0)
    assert [curve.loss_at(step) for step in (1.0, 2.0, 8.0, 99.0)] == [1.0, 4.0, 16.0, 16.0]
    assert curve.loss_at(4.0) == 8.0  # half way, in octaves, between 4 and 16
    assert curve.loss_at(0.5) == 0.25  # a quarter of the squared error
    free = Curve([1.0, 4.0], [300, 200], [0.0, 2.0], 800, 1, 1.0)
    assert free.loss_at(2.0) == 1.0
