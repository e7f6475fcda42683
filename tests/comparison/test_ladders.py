"""The largest file within a size, on ladders of made-up sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factorpack.comparison.ladders import Ladders
from factorpack.comparison.opponents import COMPARED, PLANNED, choose_compared
from factorpack.errors import PlanError
from factorpack.methods import Method, Scalar

RUNGS = tuple(Scalar(bits) for bits in range(2, 9))


@given(
    st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=7), min_size=1, max_size=3),
    st.integers(0, 1100),
)
def test_it_is_the_closest_of_the_largest_of_each_ladder(sizes: list[list[int]], max_bytes: int) -> None:
    sizes = [sorted(each) for each in sizes]
    # A method of its own for each rung: a ladder of seven widths, ladders told apart by the clip.
    ladders = [
        [Scalar(bits + 2, "mse" if number == 0 else "minmax") for bits in range(len(each))]
        for number, each in enumerate(sizes)
    ]
    known = {
        id(method): size
        for each, ladder in zip(sizes, ladders, strict=True)
        for method, size in zip(ladder, each, strict=True)
    }
    asked: list[int] = []

    def measure(method: Method) -> tuple[int, float]:
        asked.append(id(method))
        return known[id(method)], errors[id(method)]

    # The second ladder is the closest, whatever its files.
    errors = {
        id(method): abs(number - 1) + 1 / (1 + rung)
        for number, ladder in enumerate(ladders)
        for rung, method in enumerate(ladder)
    }
    found = Ladders(ladders, measure).within(max_bytes)
    highest = [
        max(fitting, key=lambda method: known[id(method)])
        for ladder in ladders
        if (fitting := [method for method in ladder if known[id(method)] <= max_bytes])
    ]
    assert (found is None) == (not highest)
    if found is not None:
        assert known[id(found)] in [known[id(method)] for method in highest]
        assert errors[id(found)] <= min(errors[id(method)] for method in highest)
    assert len(asked) == len(set(asked))  # nothing is measured twice


def test_the_smallest_of_all_ladders() -> None:
    sizes = {id(method): size for method, size in zip(RUNGS, (9, 8, 7, 6, 5, 4, 3), strict=True)}
    ladders = Ladders([RUNGS[:3], RUNGS[3:]], lambda method: (sizes[id(method)], 0.0))
    assert ladders.smallest() == 6


def test_names_are_taken_in_one_order_and_all_is_all() -> None:
    assert choose_compared(["all"]) == [PLANNED, *COMPARED]
    assert choose_compared(["vq", PLANNED]) == [PLANNED, "vq"]
    with pytest.raises(PlanError, match=r"unknown method 'zip', known are all, planned, qspca"):
        choose_compared(["vq", "zip"])
