"""The search for an order: its sums against tiles cut from the weight, its result against all orders."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.comparison.permute.order_search import Child, Order, search_order
from factorpack.errors import WeightError
from factorpack.weight import Weight
from tests.helpers import assert_close, seeded


def weight(rows: int = 12, count: int = 8, unit: int = 1, seed: int = 0) -> Tensor:
    """Channels that differ in size and lean on each other, as those of a trained layer do."""
    mixed = seeded(rows, count * unit, dtype=torch.float64, seed=seed) @ seeded(
        count * unit, count * unit, dtype=torch.float64, seed=seed + 1
    )
    return mixed.reshape(rows, count, unit) + 0.3


def search(*children: Child, iterations: int = 200, seed: int = 0) -> Order:
    return search_order(list(children), iterations, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("unit", "channels"), [(1, 2), (1, 4), (9, 2), (4, 1), (2, 8)])
def test_log_det_is_that_of_the_covariance_of_the_tiles(unit: int, channels: int) -> None:
    values = weight(rows=60, unit=unit)
    child = Child.of(values, channels, floor=0.0)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    tiles = Weight(values[:, order].flatten(1)).tiles(channels * unit)
    expected = tiles.shape[1] * torch.logdet(torch.cov(tiles, correction=0))
    assert_close(child.log_det(child.sums(order)), expected)


@given(st.integers(0, 11), st.integers(0, 11), st.sampled_from([(1, 2), (1, 3), (4, 2), (3, 4)]))
def test_a_change_is_the_difference_of_the_sums(one: int, other: int, layout: tuple[int, int]) -> None:
    unit, channels = layout
    child = Child.of(weight(count=12, unit=unit), channels)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(one))
    swapped = order.clone()
    swapped[[one, other]] = order[[other, one]]
    (change,) = child.changes(order, torch.tensor([[one, other]]))
    torch.testing.assert_close(change, child.sums(swapped) - child.sums(order), rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_a_small_weight_is_better(seed: int) -> None:
    child = Child.of(weight(count=6, seed=seed), 2)
    orders = [torch.tensor(order) for order in itertools.permutations(range(6))]
    least = min(child.log_det(child.sums(order)).item() for order in orders)
    numbers = child.tiles * child.tile
    found = search(child)
    assert found.after == pytest.approx(least / numbers, abs=1e-9)
    assert found.before == pytest.approx(child.log_det(child.sums(torch.arange(6))).item() / numbers)


def test_the_objective_never_rises_and_ends_where_it_says() -> None:
    children = [Child.of(weight(rows=40, count=24), 4), Child.of(weight(rows=9, count=24, unit=9, seed=5), 2)]
    found = search(*children)
    assert len(found.history) > 5
    assert all(later < earlier for earlier, later in itertools.pairwise(found.history))
    assert found.history[0] <= found.before
    assert found.history[-1] == pytest.approx(found.after, abs=1e-9)
    assert found.order.sort().values.tolist() == list(range(24))


def test_swaps_that_spoil_each_other_are_not_made_together() -> None:
    for seed in range(20):
        found = search(Child.of(weight(rows=2, count=16, seed=seed), 4), iterations=20)
        assert all(later < earlier for earlier, later in itertools.pairwise(found.history))


def test_a_weight_in_the_order_found_starts_where_the_search_ended() -> None:
    values = weight(count=16)
    found = search(Child.of(values, 4))
    assert search(Child.of(values[:, found.order], 4), iterations=0).before == pytest.approx(found.after)


def test_the_same_seed_finds_the_same_order() -> None:
    child = Child.of(weight(count=32), 4)
    assert torch.equal(search(child, seed=3).order, search(child, seed=3).order)
    assert not torch.equal(search(child, seed=3).order, search(child, seed=4).order)


def test_channels_that_are_copies_of_each_other_share_tiles() -> None:
    copies = seeded(50, 6, dtype=torch.float64).repeat_interleave(2, 1) + 1e-3 * seeded(
        50, 12, dtype=torch.float64, seed=1
    )
    scattered = torch.tensor([0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11])
    pairs = scattered[search(Child.of(copies[:, scattered, None], 2)).order].reshape(-1, 2) // 2
    assert torch.equal(pairs[:, 0], pairs[:, 1])


def test_channels_of_unequal_size_are_sorted_before_anything_is_swapped() -> None:
    sizes = torch.tensor([1.0, 9, 2, 8, 3, 7], dtype=torch.float64)
    values = seeded(400, 6, dtype=torch.float64) * sizes
    found = search(Child.of(values[:, :, None], 2), iterations=0)
    assert set(found.order[::2].tolist()) == {1, 3, 5}
    assert found.after < found.before


def test_a_weight_of_zeros_is_as_good_in_any_order() -> None:
    found = search(Child.of(torch.zeros(4, 6, 1), 2))
    assert found.after == found.before


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(WeightError, match="NaN or infinity"):
        Child.of(torch.full((2, 4, 1), torch.nan), 2)
