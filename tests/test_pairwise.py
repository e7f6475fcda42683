"""The helper of the contract suite keeps its promise: every pair of values, in few rows."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import pairwise

COLUMNS = st.lists(st.integers(1, 7), min_size=2, max_size=5)


def columns_of(lengths: list[int]) -> list[list[str]]:
    return [[f"{column}:{value}" for value in range(length)] for column, length in enumerate(lengths)]


@given(COLUMNS)
def test_every_pair_of_values_is_in_a_row(lengths: list[int]) -> None:
    columns = columns_of(lengths)
    rows = pairwise(*columns)
    for one, other in itertools.combinations(range(len(columns)), 2):
        assert {(row[one], row[other]) for row in rows} == set(
            itertools.product(columns[one], columns[other])
        )


@given(COLUMNS)
def test_rows_are_distinct_and_the_same_on_every_call(lengths: list[int]) -> None:
    rows = pairwise(*columns_of(lengths))
    assert rows == pairwise(*columns_of(lengths))
    assert len(set(rows)) == len(rows) <= math.prod(lengths)


def test_two_long_columns_decide_the_number_of_rows() -> None:
    """No fewer rows can hold the pairs of the two longest columns; shorter columns add next to none."""
    assert len(pairwise(range(35), range(15))) == 525
    assert 525 <= len(pairwise(range(35), range(15), range(9))) <= 550
    assert len(pairwise(range(8), range(6), range(2), range(2))) <= 50


def test_few_columns() -> None:
    assert pairwise() == []
    assert pairwise("ab") == [("a",), ("b",)]
    assert pairwise("ab", "") == pairwise("ab", "", "c") == []
