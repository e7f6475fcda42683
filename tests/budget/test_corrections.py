"""Curves corrected by measurement, and plans on them."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factorpack.budget.corrections import FAR, LARGEST, LEAST, Corrections
from factorpack.budget.curves import Curve, allocate

STEPS = [2.0**place for place in range(8)]


def curve(level: float = 1.0) -> Curve:
    """A loss that grows with the square of the step, one bit per weight and octave."""
    losses = [level * step**2 for step in STEPS]
    return Curve(STEPS, [1000 - 125 * place for place in range(8)], losses, 1000, 1, level**-0.5)


def corrections(**levels: float) -> Corrections:
    return Corrections({name: curve(level) for name, level in levels.items()}, dict.fromkeys(levels, 1.0))


def test_without_measurements_the_plan_is_that_of_the_curves() -> None:
    found = corrections(a=1.0, b=4.0)
    expected = {"a": curve(1.0), "b": curve(4.0)}
    assert found.plan(900) == allocate(expected, 900)
    assert found.curves() == expected


@pytest.mark.parametrize(("measured", "factor"), [(3.0, 3.0), (0.5, 0.5), (1e3, LARGEST), (1e-3, LEAST)])
def test_one_measurement_corrects_all_losses_but_not_by_too_much(measured: float, factor: float) -> None:
    """Loss grows like the sensitivity times the step squared: equal slope is at a step smaller by its root."""
    found = corrections(a=1.0, b=1.0)
    found.add("a", 3, measured * curve().losses[3])
    steps = found.plan(900)
    assert steps["b"] / steps["a"] == pytest.approx(factor**0.5)
    assert found.curves()["a"].losses == pytest.approx([factor * loss for loss in curve().losses])
    assert found.curves()["a"].bytes == curve().bytes
    assert found.curves()["b"] == curve()


@pytest.mark.parametrize("measured", [0.0, -1.0])
def test_nothing_measured_changes_nothing(measured: float) -> None:
    found = corrections(a=1.0)
    found.add("a", 2, measured)
    assert found.curves()["a"] == curve()


@given(step=st.floats(0.25, 512), place=st.integers(0, 7), first=st.floats(0.3, 60), last=st.floats(0.3, 60))
def test_between_two_measured_steps_a_share_of_the_change_counts(
    step: float, place: int, first: float, last: float
) -> None:
    """All of it where they are far apart, and nothing new beyond them."""
    found = corrections(a=1.0)
    found.add("a", place, first * curve().losses[place])
    found.add("a", 5, last * curve().losses[5])
    assert found.factor_at("a", STEPS[5]) == pytest.approx(last)
    apart = abs(place - 5)
    way = min(max((log2(step) - 5) / (place - 5), 0.0), 1.0) if apart else 0.0
    share = apart**2 / (apart**2 + FAR**2)
    assert found.factor_at("a", step) == pytest.approx(last * (first / last) ** (way * share))


def test_what_was_measured_of_a_lost_layer_does_not_count_where_it_is_fine() -> None:
    """A weight that does 64 times as much at a coarse step, and what was predicted at a fine one."""
    found = corrections(a=1.0, b=1.0)
    found.add("a", 7, LARGEST * curve().losses[7])
    found.add("a", 1, curve().losses[1])
    fine, coarse = found.plan(1800), found.plan(500)
    assert fine["a"] == pytest.approx(fine["b"], rel=0.01)
    assert coarse["b"] / coarse["a"] > 2
    # The plan and its corrections agree.
    assert found.factor_at("a", coarse["a"]) ** 0.5 == pytest.approx(coarse["b"] / coarse["a"], rel=0.02)
