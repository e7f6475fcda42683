"""Rows that hold every pair of values of every two columns, in far fewer rows than the full product."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

Pair = tuple[int, int, int, int]
"""A column, its value's index, another column, and that value's index."""


def pairwise(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value per column. The same columns give the same rows.

    Greedy: a row begins with the first pair that no row holds, and takes in every other column the value
    that adds most new pairs, or else the one used least. A single column gives a row per value.
    """
    columns = [list(values) for values in choices]
    if len(columns) < 2:
        return [(value,) for column in columns for value in column]
    if not all(columns):
        return []
    missing = dict.fromkeys(_all_pairs([len(column) for column in columns]))  # ordered, unlike a set
    used = [[0] * len(column) for column in columns]
    rows = []
    while missing:
        row = _next_row(next(iter(missing)), missing, used)
        for pair in _pairs_of(row):
            missing.pop(pair, None)
        for column, value in row.items():
            used[column][value] += 1
        rows.append(tuple(columns[column][row[column]] for column in range(len(columns))))
    return rows


def _all_pairs(lengths: list[int]) -> list[Pair]:
    """The pairs of the longest columns first: other columns then fit into their rows."""
    order = sorted(range(len(lengths)), key=lambda column: -lengths[column])
    return [
        _pair((one, value), (other, others_value))
        for one, other in itertools.combinations(order, 2)
        for value in range(lengths[one])
        for others_value in range(lengths[other])
    ]


def _next_row(seed: Pair, missing: dict[Pair, None], used: list[list[int]]) -> dict[int, int]:
    row = {seed[0]: seed[1], seed[2]: seed[3]}
    for column, counts in enumerate(used):
        if column not in row:
            row[column] = max(
                range(len(counts)),
                key=lambda value: (
                    sum(_pair((column, value), placed) in missing for placed in row.items()),
                    -counts[value],
                ),
            )
    return row


def _pairs_of(row: dict[int, int]) -> list[Pair]:
    return [_pair(one, other) for one, other in itertools.combinations(row.items(), 2)]


def _pair(one: tuple[int, int], other: tuple[int, int]) -> Pair:
    return (*one, *other) if one < other else (*other, *one)
