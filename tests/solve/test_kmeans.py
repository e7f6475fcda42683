"""k-means against closed forms, a float64 reference, and what its steps must never do."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.solve import kmeans as solver
from factorpack.solve.kmeans import (
    annealed_kmeans,
    kmeans,
    kmeans_plus_plus,
    lloyd_step,
    nearest,
    reseed_unused,
    sums_by_index,
)
from tests.helpers import assert_close, assert_same_tensor, seeded


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distances(points: Tensor, codewords: Tensor) -> Tensor:
    return (points[:, None] - codewords).double().square().sum(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scores", [1, 37, 1 << 20])
def test_nearest_is_the_nearest(dtype: torch.dtype, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few distances are held at once."""
    monkeypatch.setattr(solver, "SCORES", scores)
    points, codewords = seeded(101, 5, dtype=dtype), seeded(7, 5, dtype=dtype, seed=1)
    indices, errors = nearest(points, codewords)
    expected = distances(points, codewords).min(1)
    assert torch.equal(indices, expected.indices)
    assert_close(errors, expected.values, dtype)


def test_no_array_of_distances_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    real = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **b: found.append(real(*a, **b)) or found[-1])
    nearest(seeded(20_000, 2), seeded(300, 2))
    assert max(part.numel() for part in found) <= solver.SCORES < 20_000 * 300


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_totals_by_hand(rows: int, size: int, count: int, weighted: bool) -> None:
    points = seeded(rows, size, dtype=torch.float64)
    indices = torch.randint(count, (rows,), generator=generator())
    weights = seeded(rows, seed=2).abs() if weighted else None
    sums, shares = sums_by_index(points, indices, count, weights)
    heavy = torch.ones(rows) if weights is None else weights
    for index in range(count):
        mine = indices == index
        assert_close(sums[index], (points[mine] * heavy[mine, None]).sum(0), torch.float32)
        assert_close(shares[index], heavy[mine].double().sum(), torch.float32)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_error_never_rises(weighted: bool) -> None:
    points = seeded(400, 4, dtype=torch.float64)
    weights = seeded(400, dtype=torch.float64, seed=3).square() if weighted else None
    codewords = kmeans_plus_plus(points, 12, generator(), weights)
    errors = []
    for _ in range(15):
        codewords, _, error = lloyd_step(points, codewords, weights)
        errors.append(error.item())
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(errors))
    assert errors[-1] < 0.9 * errors[0]


def test_at_a_fixed_point_codewords_are_weighted_means() -> None:
    points, weights = seeded(200, 3, dtype=torch.float64), seeded(200, seed=1).abs().double()
    codewords = kmeans(points, kmeans_plus_plus(points, 6, generator(), weights), 200, weights)
    for _ in range(100):
        codewords, _, _ = lloyd_step(points, codewords, weights)
    indices, _ = nearest(points, codewords)
    for index in range(6):
        mine = indices == index
        mean = (points[mine] * weights[mine, None]).sum(0) / weights[mine].sum()
        assert_close(codewords[index], mean, torch.float64)


def test_whole_weights_are_repeated_points() -> None:
    points = seeded(60, 3, dtype=torch.float64)
    often = torch.arange(60) % 4 + 1
    start = points[:5]
    once = kmeans(points, start, 20, often.double())
    assert_close(once, kmeans(points.repeat_interleave(often, 0), start, 20), torch.float64)


def test_far_clusters_are_found() -> None:
    """A start by distance, point after point, draws one of each: the error left is the clusters' own."""
    centres = 1000 * seeded(16, 4, dtype=torch.float64)
    inner = seeded(16 * 50, 4, dtype=torch.float64, seed=1)
    points = centres.repeat_interleave(50, 0) + inner
    codewords = kmeans(points, kmeans_plus_plus(points, 16, generator()), 10)
    own = inner.reshape(16, 50, 4)
    expected = (own - own.mean(1, keepdim=True)).square().sum()
    # Distances are differences of squares a million times as large.
    assert_close(nearest(points, codewords)[1].sum(), expected, torch.float32)


def test_a_start_is_of_points_that_have_a_weight() -> None:
    """However far the others lie."""
    points = torch.cat([seeded(30, 3), 100 * seeded(30, 3, seed=1)])
    weights = torch.cat([torch.ones(30), torch.zeros(30)])
    start = kmeans_plus_plus(points, 12, generator(), weights)
    assert (start[:, None] == points[:30]).all(2).any(1).all()
    assert len({tuple(row) for row in start.tolist()}) == 12


def test_points_as_few_as_codewords_are_codewords() -> None:
    points = seeded(9, 3)
    codewords = kmeans(points, kmeans_plus_plus(points, 9, generator()), 5)
    assert_same_tensor(codewords[nearest(points, codewords)[0]], points)
    assert len({tuple(row) for row in codewords.tolist()}) == 9


def test_codewords_nobody_is_nearest_to_start_again_where_errors_are_largest() -> None:
    points = torch.tensor([[0.0], [0.1], [5.0], [9.0]])
    start = torch.tensor([[0.0], [100.0], [200.0]])
    moved, shares, error = lloyd_step(points, start)
    assert shares.tolist() == [4, 0, 0]
    assert error.item() == pytest.approx(0.01 + 25 + 81)
    assert moved.tolist() == [[pytest.approx(14.1 / 4)], [9.0], [5.0]]


def test_more_codewords_than_points_can_start_again() -> None:
    points = seeded(2, 3)
    moved = reseed_unused(torch.zeros(5, 3), torch.zeros(5), points, torch.tensor([1.0, 2.0]))
    assert_same_tensor(moved, torch.cat([points.flip(0), torch.zeros(3, 3)]))


def test_equal_points_are_no_trouble() -> None:
    points = torch.ones(50, 4)
    codewords = kmeans(points, kmeans_plus_plus(points, 8, generator()), 5)
    assert codewords.isfinite().all()
    assert nearest(points, codewords)[1].max() == 0


def test_the_same_seed_finds_the_same() -> None:
    points = seeded(3000, 4)
    for solve in (
        lambda draw: kmeans(points, kmeans_plus_plus(points, 32, draw), 8),
        lambda draw: annealed_kmeans(points, kmeans_plus_plus(points, 32, draw), 8, draw),
    ):
        assert_same_tensor(solve(generator(4)), solve(generator(4)))
        assert not torch.equal(solve(generator(4)), solve(generator(5)))


def test_without_heat_annealing_is_plain() -> None:
    points = seeded(300, 4, dtype=torch.float64)
    start = kmeans_plus_plus(points, 10, generator())
    plain = start
    for _ in range(6):
        plain, _, _ = lloyd_step(points, plain)
    assert_same_tensor(annealed_kmeans(points, start, 6, generator(), heat=0.0), plain)


def test_the_noise_of_a_mean_has_the_points_covariance_over_their_number() -> None:
    """One codeword, one step of full heat: its mean and covariance over many draws."""
    points = seeded(50, 3, dtype=torch.float64) @ torch.diag(torch.tensor([1.0, 3.0, 0.2]).double())
    draw = generator()
    found = torch.cat([annealed_kmeans(points, points[:1], 1, draw) for _ in range(4000)])
    centred = points - points.mean(0)
    covariance = centred.T @ centred / 50
    noise = (found - points.mean(0)) * 50**0.5
    scale = covariance.diagonal().sqrt()
    # A sample covariance of 4,000 draws is within about 1/sqrt(4000) of the scales' product.
    assert ((noise.T @ noise / 4000 - covariance) / scale[:, None] / scale).abs().max() < 5 / 4000**0.5
    assert (noise.mean(0) / scale).abs().max() < 5 / 4000**0.5


def test_annealing_ends_no_worse_on_average() -> None:
    plain, annealed = [], []
    for seed in range(8):
        points = seeded(600, 2, dtype=torch.float64, seed=seed)
        start = kmeans_plus_plus(points, 24, generator(seed))
        plain.append(nearest(points, kmeans(points, start, 60))[1].sum())
        warm = annealed_kmeans(points, start, 60, generator(seed))
        annealed.append(nearest(points, kmeans(points, warm, 30))[1].sum())
    assert sum(annealed) < sum(plain)
