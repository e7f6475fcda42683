"""The search for a number of bytes: on smooth curves, on stairs, and inside what is known."""

from __future__ import annotations

from collections.abc import Callable
from math import exp2, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factorpack.budget.step_search import StepSearch

NUMEL = 80_000


def smooth(step: float) -> int:
    """A bit a weight an octave where steps are fine, less and less where they are coarse."""
    return round(NUMEL / 8 * log2(1 + 30 / step))


def found(size_at: Callable[[float], int], start: float, wanted: float, rounds: int) -> list[int]:
    search, step, sizes = StepSearch(NUMEL), start, []
    for _ in range(rounds):
        sizes.append(size_at(step))
        step = search.next_after(step, sizes[-1], wanted)
    return sizes


@given(start=st.floats(-6, 6), share=st.floats(0.02, 0.9))
def test_a_smooth_curve_is_met_from_anywhere(start: float, share: float) -> None:
    wanted = share * NUMEL
    sizes = found(smooth, exp2(start), wanted, 16)
    assert min(abs(size - wanted) for size in sizes) <= 0.005 * wanted + 2


@pytest.mark.parametrize("wanted", [10_500.0, 14_999.0, 20_001.0])
def test_stairs_end_on_both_sides_of_the_step_they_jump_at(wanted: float) -> None:
    """Nothing lies between two stairs: the search must close in on the edge, not jump to and fro."""

    def stairs(step: float) -> int:
        return smooth(exp2(round(2 * log2(step)) / 2))

    search, step = StepSearch(NUMEL), 3.0
    for _ in range(24):
        step = search.next_after(step, stairs(step), wanted)
    assert search.low is not None
    assert search.high is not None
    assert stairs(search.low) > wanted >= stairs(search.high)
    assert search.high / search.low < 1.01
    assert search.finest(99.0) == search.low


def test_without_a_number_that_gave_too_much_the_last_one_is_the_finest() -> None:
    search = StepSearch(NUMEL)
    search.next_after(2.0, 100, 5_000.0)
    assert search.finest(2.0) == 2.0


@given(sizes=st.lists(st.integers(1, 100_000), min_size=2, max_size=12), wanted=st.floats(1, 1e5))
def test_what_is_tried_stays_between_what_is_known(sizes: list[int], wanted: float) -> None:
    """Whatever sizes come: positive, finite, and inside the bracket once there is one."""
    search, step = StepSearch(NUMEL), 1.0
    for size in sizes:
        step = search.next_after(step, size, wanted)
        assert 0 < step < float("inf")
        if search.low is not None and search.high is not None and search.low < search.high:
            assert search.low <= step <= search.high
