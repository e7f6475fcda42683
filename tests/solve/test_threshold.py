"""Hard thresholding counts extra zeros, and takes the smallest first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factorpack.solve.threshold import extra_zero_mask
from tests.helpers import seeded


def kept(stored: list[float], extra: float, latent: list[float] | None = None) -> list[bool]:
    quantized = torch.tensor(stored)
    return extra_zero_mask(quantized, torch.tensor(latent or stored), extra).tolist()


def test_the_smallest_go_first_whatever_their_sign() -> None:
    assert kept([5.0, -1.0, 3.0, -4.0, 2.0], 0.4) == [True, False, True, True, False]


def test_zeros_from_rounding_are_not_counted() -> None:
    """One half of four entries is two, on top of the zero that was there."""
    assert kept([0.0, 1.0, 2.0, 3.0], 0.5) == [True, False, False, True]


def test_the_share_is_of_all_entries_and_not_of_the_non_zeros() -> None:
    assert kept([0.0] * 6 + [1.0, 2.0, 3.0, 4.0], 0.2).count(False) == 2


def test_more_asked_for_than_there_are() -> None:
    assert kept([0.0, 0.0, 0.0, 7.0], 0.9) == [True, True, True, False]
    assert kept([0.0, 0.0], 0.9) == [True, True]


def test_nothing_asked_for() -> None:
    assert kept([1.0, 0.0, 2.0], 0.0) == [True] * 3
    assert extra_zero_mask(torch.empty(0, 3), torch.empty(0, 3), 0.5).shape == (0, 3)


def test_equals_are_taken_by_the_latent_they_came_from() -> None:
    assert kept([1.0, -1.0, 1.0, 2.0], 0.25, [1.2, -0.8, 0.9, 0.1]) == [True, False, True, True]


def test_what_is_stored_counts_before_the_latent() -> None:
    assert kept([2.0, 1.0], 0.5, [0.1, 9.0]) == [True, False]


def test_full_ties_still_give_the_exact_count() -> None:
    assert kept([1.0] * 5, 0.4).count(False) == 2
    assert kept([-1.0, 1.0] * 500, 0.333).count(False) == 333


@pytest.mark.parametrize(("share", "count"), [(0.1, 6), (0.25, 16), (0.5, 32), (0.99, 63)])
def test_known_counts_in_a_matrix(share: float, count: int) -> None:
    matrix = seeded(8, 8)
    mask = extra_zero_mask(matrix, matrix, share)
    assert mask.shape == (8, 8)
    assert int((~mask).sum()) == count
    assert matrix[~mask].abs().max() <= matrix[mask].abs().min()


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0.0, 0.999))
def test_count_and_order_for_any_codes(codes: list[int], share: float) -> None:
    stored = torch.tensor(codes, dtype=torch.float32)
    mask = extra_zero_mask(stored, stored, share)
    assert int((~mask).sum()) == min(round(share * len(codes)), int(stored.count_nonzero()))
    assert stored[~mask].ne(0).all()
    alive = stored[mask & stored.ne(0)].abs()
    if alive.numel() and (~mask).any():
        assert stored[~mask].abs().max() <= alive.min()
