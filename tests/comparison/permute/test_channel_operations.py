"""Reshapes: which dimension a group goes on in, against what becomes of labelled numbers."""

from __future__ import annotations

import math

import pytest
import torch

from factorpack.comparison.permute.channel_operations import Value, reshape
from factorpack.comparison.permute.ties import Ties

FROZEN = None


@pytest.mark.parametrize(
    ("before", "group", "after", "place", "repeat"),
    [
        ((2, 6, 4, 4), 1, (2, 96), 1, 16),
        ((2, 6, 1, 1), 1, (2, 6), 1, 1),
        ((1, 6, 4), 1, (1, 24), 1, 4),
        ((2, 6, 4), 2, (12, 4), 1, 1),
        ((2, 6), 1, (2, 6, 1, 1), 1, 1),
        ((2, 6), 1, (2, 1, 6), 2, 1),
        ((2, 6, 4), 1, (12, 4), FROZEN, 0),  # behind the batch
        ((2, 6, 4), 2, (2, 24), FROZEN, 0),  # behind the channels
        ((2, 6), 1, (2, 3, 2), FROZEN, 0),  # taken apart
        ((2, 6, 4), 1, (2, 4, 6), FROZEN, 0),
    ],
)
def test_where_a_group_goes(
    before: tuple[int, ...], group: int, after: tuple[int, ...], place: int | None, repeat: int
) -> None:
    ties = Ties()
    axes = tuple(ties.fresh(size) for size in before)
    result = reshape(ties, after, {"self": Value(axes)})
    assert [ties.size(axis) for axis in result] == list(after)
    assert (ties.frozen(axes[group]) != "") == (place is FROZEN)
    if place is not FROZEN:
        assert ties.resolve(result[place]) == axes[group].times(repeat)
        labels = torch.arange(math.prod(before)).reshape(before)
        order = torch.randperm(before[group], generator=torch.Generator().manual_seed(0))
        index = (order[:, None] * repeat + torch.arange(repeat)).flatten()
        moved = labels.index_select(group, order).reshape(after)
        assert torch.equal(moved, labels.reshape(after).index_select(place, index))


def test_a_image_that_was_flattened_can_be_a_image_again() -> None:
    ties = Ties()
    axes = (ties.fresh(2), ties.fresh(6), ties.fresh(4))
    flat = reshape(ties, (2, 24), {"self": Value(axes)})
    assert reshape(ties, (2, 6, 2, 2), {"self": Value(flat)})[1] == axes[1]
    assert reshape(ties, (2, 12, 2), {"self": Value(flat)})[1] == axes[1].times(2)
    assert not ties.frozen(axes[1])
    reshape(ties, (2, 3, 8), {"self": Value(flat)})
    assert ties.frozen(axes[1])
