"""Sums of codewords: every step against its closed form, and the error only ever falls."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from factorpack.solve.additive import (
    AdditiveCode,
    additive_quantize,
    closest_codewords,
    move_unused_codewords,
    residual_kmeans,
    update_codebooks,
    update_codes,
    update_pairs,
)
from factorpack.solve.kmeans import kmeans, kmeans_plus_plus, nearest
from tests.helpers import assert_close, assert_same_tensor, seeded

WIDE = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_sums(points: int = 200, stages: int = 3, count: int = 5, size: int = 4) -> AdditiveCode:
    return AdditiveCode(
        seeded(points, size, dtype=WIDE),
        seeded(stages, count, size, dtype=WIDE, seed=1) / stages**0.5,
        torch.randint(count, (stages, points), generator=generator()),
    )


def test_the_error_is_that_of_the_sums() -> None:
    sums = random_sums()
    expected = 0.0
    for number, point in enumerate(sums.points):
        made = sum(book[index] for book, index in zip(sums.codebooks, sums.indices[:, number], strict=True))
        expected += (point - made).square().sum().item()
    assert sums.error().item() == pytest.approx(expected, rel=1e-12)


def test_codes_are_the_best_of_a_stage_while_the_others_stay() -> None:
    sums = random_sums(stages=2)
    after = update_codes(sums)
    first = [
        min(range(5), key=lambda c: (x - sums.codebooks[0, c] - sums.codebooks[1, j]).square().sum().item())
        for x, j in zip(sums.points, sums.indices[1], strict=True)
    ]
    assert after.indices[0].tolist() == first
    second = [
        min(range(5), key=lambda c: (x - sums.codebooks[0, i] - sums.codebooks[1, c]).square().sum().item())
        for x, i in zip(sums.points, first, strict=True)
    ]
    assert after.indices[1].tolist() == second


def test_codebooks_are_the_least_squares() -> None:
    """Against a dense solver, up to the ridge's part, and no better codebooks nearby."""
    sums = random_sums()
    after = update_codebooks(sums)
    ones = torch.cat([torch.nn.functional.one_hot(index, 5) for index in sums.indices], 1).to(WIDE)
    solution = torch.linalg.lstsq(ones, sums.points, driver="gelsd").solution
    least = (sums.points - ones @ solution).square().sum().item()
    assert after.error().item() == pytest.approx(least, rel=1e-6)
    assert least < 0.9 * sums.error().item()


def test_codewords_nobody_uses_stay_in_least_squares_and_then_start_again() -> None:
    sums = random_sums()
    sums = replace(sums, indices=sums.indices.clamp_max(2))
    after = update_codebooks(sums)
    assert_same_tensor(after.codebooks[:, 3:], sums.codebooks[:, 3:])
    again = move_unused_codewords(after)
    assert_same_tensor(again.codebooks[:, :3], after.codebooks[:, :3])
    worst = after.residual().square().sum(1).topk(2).indices
    for stage in range(3):
        rest = after.residual()[worst] + after.codebooks[stage][after.indices[stage][worst]]
        assert_close(again.codebooks[stage, 3:], rest)
    assert again.error() == after.error()
    assert update_codes(again).error() < after.error()


def test_no_step_makes_the_error_larger() -> None:
    sums, errors = random_sums(), []
    for _ in range(8):
        for step in (update_codebooks, move_unused_codewords, update_codes):
            sums = step(sums)
            errors.append(sums.error().item())
        sums = update_pairs(sums, generator(len(errors)))
        errors.append(sums.error().item())
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(errors))
    assert errors[-1] < 0.7 * errors[0]


@pytest.mark.parametrize("stages", [2, 3])
def test_pairs_are_better_than_single_stages(stages: int) -> None:
    """With all candidates and two stages nothing is better; conditional modes alone get stuck."""
    points, books = seeded(300, 3, dtype=WIDE), seeded(stages, 4, 3, dtype=WIDE, seed=1)
    stuck = AdditiveCode(points, books, torch.zeros(stages, 300, dtype=torch.int64))
    for _ in range(20):
        stuck = update_codes(stuck)
    sums = stuck
    for seed in range(20):
        sums = update_pairs(sums, generator(seed))
    chosen = product(range(4), repeat=stages)
    every = torch.stack([books[range(stages), list(each)].sum(0) for each in chosen])
    best = nearest(points, every)[1].sum().item()
    assert stuck.error().item() > 1.05 * best
    if stages == 2:
        assert sums.error().item() == pytest.approx(best, rel=1e-12)
    else:
        assert best < sums.error().item() < stuck.error().item()


def test_closest_are_the_closest() -> None:
    points, codewords = seeded(50, 3, dtype=WIDE), seeded(9, 3, dtype=WIDE, seed=1)
    expected = torch.cdist(points, codewords).argsort(1)[:, :4]
    assert torch.equal(closest_codewords(points, codewords, 4), expected)


def test_one_stage_is_k_means() -> None:
    points = seeded(300, 4, dtype=WIDE)
    found = additive_quantize(points, 1, 8, 10, generator())
    assert_same_tensor(found.codebooks[0], kmeans(points, kmeans_plus_plus(points, 8, generator()), 10))


def test_it_is_better_than_its_start_and_the_start_than_one_stage() -> None:
    points = seeded(1000, 6, dtype=WIDE)
    one = additive_quantize(points, 1, 16, 10, generator()).error()
    start = residual_kmeans(points, 2, 16, 10, generator()).error()
    found = additive_quantize(points, 2, 16, 10, generator()).error()
    assert found < 0.97 * start < 0.97 * one


def test_sums_of_few_codewords_are_found_exactly() -> None:
    """Points on a grid: two codebooks of two codewords each make all four of them."""
    corners = torch.tensor([[x, y] for x in (-1.0, 1.0) for y in (-3.0, 3.0)], dtype=WIDE)
    found = additive_quantize(corners.repeat(20, 1), 2, 2, 5, generator())
    assert found.error().item() < 1e-6


def test_the_same_seed_finds_the_same() -> None:
    points = seeded(400, 4)
    one, other = (additive_quantize(points, 2, 16, 3, generator(7)) for _ in range(2))
    assert_same_tensor(one.codebooks, other.codebooks)
    assert_same_tensor(one.indices, other.indices)
