"""The basis over tiles and the problem posed in it, against linear algebra in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import frexp

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.methods import SecondOrder
from factorpack.record import MEAN_LEFT, LayerMoments
from factorpack.solve.feedback import feedback_factor, round_with_feedback, rounding_order
from factorpack.solve.layer_problem import (
    Basis,
    LayerProblem,
    held_by,
    layer_problem,
    layer_problems,
    restoring_factor,
    round_many,
    scales_of_weights,
    smooth_inputs,
    tile_basis,
)
from factorpack.weight import Weight
from tests.helpers import assert_close, relative_error, seeded

LITTLE = 1e-9
"""A damping that hardly counts."""


def mixed(samples: int, size: int, seed: int = 0, unit: float = 1.0) -> Tensor:
    """Correlated inputs: (samples, size)."""
    return unit * seeded(samples, size, seed=seed) @ seeded(size, size, seed=seed + 1) / size**0.5


def moments_of(inputs: Tensor, original: Tensor | None = None, rows: Tensor | None = None) -> LayerMoments:
    """Of (groups, samples, K), for a weight of `rows` (out, K) where the original inputs were others."""
    before = inputs if original is None else original
    count = inputs.shape[1]
    cross = None
    if rows is not None:
        outputs = before @ rows.reshape(len(inputs), -1, rows.shape[1]).transpose(1, 2)
        cross = outputs.transpose(1, 2) @ inputs / count
    return LayerMoments(
        inputs.transpose(1, 2) @ inputs / count,
        inputs.mean(1),
        cross,
        before.mean(1),
    )


def mean_block(second: Tensor, tile: int) -> Tensor:
    """A: the mean second moment of a tile of inputs, over groups and tiles."""
    size = second.shape[1]
    blocks = [second[:, s : s + tile, s : s + tile] for s in range(0, size, tile)]
    return torch.stack(blocks).double().mean((0, 1))


def off_diagonal(matrix: Tensor) -> float:
    """The largest correlation between two different rows."""
    spread = matrix.diagonal().clamp_min(1e-300).sqrt()
    scaled = matrix / spread[:, None] / spread
    return float((scaled - torch.diag(scaled.diagonal())).abs().max())


# -- the basis ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [4, 9])
def test_errors_in_any_latent_cost_the_same_and_latents_do_not_correlate(tile: int) -> None:
    rows = mixed(40, 4 * tile, seed=3)
    moments = moments_of(mixed(3000, 4 * tile)[None])
    matrix = tile_basis(rows, tile, moments.second).matrix().double()
    eight_bits = 0.5 / 127 * tile**0.5 * 4  # each of `tile` terms half a code off, some columns short
    assert abs(float(torch.linalg.det(matrix).abs()) - 1.0) < tile * eight_bits

    whitened = matrix.T @ mean_block(moments.second, tile) @ matrix
    assert off_diagonal(whitened) < eight_bits * 4
    assert whitened.diagonal().max() / whitened.diagonal().min() < 1 + 8 * eight_bits

    latents = torch.linalg.solve(matrix, rows.reshape(-1, tile).double().T)
    spread = latents @ latents.T / latents.shape[1]
    assert off_diagonal(spread) < eight_bits * 8
    before = rows.reshape(-1, tile).double()
    assert off_diagonal(spread) < 0.5 * off_diagonal(before.T @ before / len(before))


@pytest.mark.parametrize("tile", [4, 9, 16])
def test_without_moments_it_is_the_principal_directions(tile: int) -> None:
    rows = mixed(60, 3 * tile, seed=3)
    tiles = rows.reshape(-1, tile).double()
    matrix = tile_basis(rows, tile).matrix().double()
    half_code = 0.5 / 127
    eye = torch.eye(tile, dtype=torch.float64)
    assert (matrix.T @ matrix - eye).abs().max() < 4 * half_code * tile**0.5
    values, vectors = torch.linalg.eigh(tiles.T @ tiles)
    overlap = (matrix.T @ vectors.flip(1)).diagonal().abs()
    gaps = values.flip(0)[:-1] / values.flip(0)[1:]
    assert overlap[0] > 1 - 4 * half_code * tile**0.5
    assert (overlap > 0.98).all() or gaps.min() < 1.05


def test_directions_come_from_strong_to_weak_with_their_signs_settled() -> None:
    rows = mixed(60, 36, seed=3)
    matrix = tile_basis(rows, 9).matrix()
    tiles = rows.reshape(-1, 9)
    energy = (tiles @ matrix).square().sum(0)
    assert (energy[:-1] > 0.97 * energy[1:]).all()
    assert (matrix.gather(0, matrix.abs().argmax(0, keepdim=True)) > 0).all()
    assert torch.equal(tile_basis(-rows, 9).codes, tile_basis(rows, 9).codes)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("tile", [9, 128])
def test_the_unit_of_the_inputs_does_not_matter(tile: int, unit: float) -> None:
    """A determinant of many numbers far from 1 overflows; only its root is needed."""
    rows = seeded(150, 2 * tile, seed=3)
    inputs = mixed(1000, 2 * tile)
    expected = tile_basis(rows, tile, moments_of(inputs[None]).second).matrix()
    found = tile_basis(rows, tile, moments_of(unit * inputs[None]).second).matrix()
    assert relative_error(found, expected) < 0.01


def test_a_tile_of_inputs_that_are_hardly_ever_there_leaves_a_basis_that_can_be_inverted() -> None:
    """One input far weaker than the others takes one long column: the others must not round away."""
    tile = 256
    inputs = seeded(4000, tile)
    inputs[:, 0] *= 1e-3
    moments, rows = moments_of(inputs[None]), seeded(64, tile, seed=1)
    basis = tile_basis(rows, tile, moments.second)
    assert torch.linalg.cond(basis.matrix().double()) < 1e4
    posed = layer_problem(rows, moments, basis)
    assert relative_error(posed.latent[0] @ basis.matrix().T, rows) < 1e-3


@pytest.mark.parametrize("rows", [torch.zeros(8, 18), torch.ones(8, 18)], ids=["zeros", "ones"])
def test_weights_of_no_spread(rows: Tensor) -> None:
    for second in (None, moments_of(mixed(500, 18)[None]).second, moments_of(torch.zeros(1, 5, 18)).second):
        matrix = tile_basis(rows, 9, second).matrix()
        assert matrix.isfinite().all()
        assert torch.linalg.matrix_rank(matrix) == 9


def factor_in_order(second: Tensor, order: Tensor | None, damping: float = 0.03) -> Tensor:
    """The factor of moments (groups, K, K) whose rows and columns are put in an order, (K,)."""
    assert order is not None
    return feedback_factor(second[:, order][:, :, order], damping)


# -- the problem -------------------------------------------------------------------------------------


@given(tiles=st.integers(1, 4), tile=st.integers(2, 9), seed=st.integers(0, 1000), with_moments=st.booleans())
def test_the_latent_is_the_weight_again(tiles: int, tile: int, seed: int, with_moments: bool) -> None:
    rows = seeded(12, tiles * tile, seed=seed)
    moments = moments_of(mixed(200, tiles * tile, seed=seed + 1)[None]) if with_moments else None
    basis = tile_basis(rows, tile, None if moments is None else moments.second)
    posed = layer_problem(rows, moments, basis)
    back = (posed.latent.reshape(-1, tile) @ basis.matrix().T).reshape_as(rows)
    condition = float(torch.linalg.cond(basis.matrix()))
    assert relative_error(back, rows) < 1e-6 * max(condition, 10.0)


def test_neighbours_under_a_kernel_are_expected_to_be_alike() -> None:
    row = [1.0, 0.5, 0.25]
    assert smooth_inputs((3,)).tolist() == [[row, [0.5, 1.0, 0.5], row[::-1]]]
    assert smooth_inputs((3, 3))[0, 0].tolist() == [a * b for a in row for b in row]  # by rows, then columns


def test_without_a_basis_or_moments_the_latent_is_the_weight() -> None:
    rows = seeded(5, 12)
    posed = layer_problem(rows, None)
    assert torch.equal(posed.latent[0], rows)
    assert posed.factor is None
    assert torch.equal(posed.importance(), torch.ones(1, 12))
    assert torch.equal(layer_problem(rows, moments_of(mixed(99, 12)[None])).latent[0], rows)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_factor_is_that_of_the_turned_moments(groups: int) -> None:
    """H' = (I kron C)^T H (I kron C), written out."""
    inputs = torch.stack([mixed(900, 12, seed=seed) for seed in range(groups)])
    rows = seeded(4 * groups, 12)
    moments = moments_of(inputs)
    basis = tile_basis(rows, 4, moments.second)
    posed = layer_problem(rows, moments, basis, 0.01)
    assert posed.latent.shape == (groups, 4, 12)
    whole = torch.block_diag(*[basis.matrix().double()] * 3)
    expected = factor_in_order(whole.T @ moments.second.double() @ whole, posed.order, 0.01)
    assert posed.factor is not None
    assert_close(posed.factor, expected, torch.float32)
    assert_close(posed.importance(), expected.diagonal(dim1=1, dim2=2).pow(-2), torch.float32)


def test_inputs_that_have_not_changed_leave_the_weight_alone() -> None:
    inputs = mixed(600, 10)[None]
    rows = seeded(6, 10, seed=5)
    posed = layer_problem(rows, moments_of(inputs, inputs.clone(), rows))
    assert_close(posed.latent[0], rows)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_linear_change_of_the_inputs_is_undone(groups: int) -> None:
    """u = A u' without noise: the adapted weight answers u as the weight answered u'."""
    original = torch.stack([seeded(600, 8, seed=seed) for seed in range(groups)])
    change = torch.eye(8) + 0.2 * seeded(groups, 8, 8, seed=20)
    inputs = original @ change.transpose(1, 2)
    rows = seeded(5 * groups, 8, seed=30)
    posed = layer_problem(rows, moments_of(inputs, original, rows), None, LITTLE)
    split = rows.reshape(groups, 5, 8)
    wanted = original @ split.transpose(1, 2)
    assert relative_error(inputs @ posed.latent.transpose(1, 2), wanted) < 1e-3
    assert relative_error(inputs @ split.transpose(1, 2), wanted) > 0.1


def test_the_adapted_weight_answers_noisy_inputs_best() -> None:
    """Least squares: no other weight of a thousand nearby does better."""
    original = seeded(1, 600, 6)
    inputs = original + 0.5 * seeded(1, 600, 6, seed=1)
    rows = seeded(3, 6, seed=2)
    latent = layer_problem(rows, moments_of(inputs, original, rows), None, LITTLE).latent[0]
    expected = torch.linalg.lstsq(inputs[0].double(), original[0].double() @ rows.double().T).solution.T
    assert relative_error(latent, expected) < 1e-4


# -- moments about the mean --------------------------------------------------------------------------


def with_and_without_means(
    rows: Tensor, groups: int, adapted: bool, seed: int = 0
) -> tuple[LayerMoments, LayerMoments]:
    """Moments of inputs of large means where mean outputs are restored, and those of the same almost without."""
    inputs = torch.stack([mixed(400, rows.shape[1], seed + group) for group in range(groups)])
    inputs = inputs + 3 * seeded(groups, 1, rows.shape[1], seed=seed + 7)
    original = inputs + 0.3 * seeded(*inputs.shape, seed=seed + 8) - seeded(groups, 1, rows.shape[1])
    pair = (original, rows) if adapted else ()
    left = 1 - MEAN_LEFT**0.5
    alone = (original - left * original.mean(1, keepdim=True), rows) if adapted else ()
    found = replace(moments_of(inputs, *pair), restores_mean=True)
    return found, moments_of(inputs - left * inputs.mean(1, keepdim=True), *alone)


@given(groups=st.sampled_from([1, 3]), adapted=st.booleans(), seed=st.integers(0, 99))
def test_about_the_mean_they_are_those_of_inputs_without_means(groups: int, adapted: bool, seed: int) -> None:
    rows = seeded(4 * groups, 8, seed=seed)
    moments, expected = with_and_without_means(rows, groups, adapted, seed)
    found = moments.about_mean(rows)
    torch.testing.assert_close(found.second, expected.second, rtol=1e-4, atol=1e-4)
    assert (found.cross is None) == (not adapted)
    if found.cross is not None:
        torch.testing.assert_close(found.cross, expected.cross, rtol=1e-4, atol=1e-4)
    assert found.about_mean(rows) is found
    as_it_is = replace(moments, restores_mean=False)
    assert as_it_is.about_mean(rows) is as_it_is


@pytest.mark.parametrize("positions", [1, 50])
def test_inputs_that_do_not_vary_leave_a_weight_as_large_as_it_was(positions: int) -> None:
    """Nothing is left of them but errors of sums, which a weight that adapts must not be divided by."""
    rows, one = seeded(6, 32), 30 + seeded(1, 1, 32, seed=1)
    inputs, original = one.expand(1, positions, 32), 1.01 * one.expand(1, positions, 32)
    moments = replace(moments_of(inputs, original, rows), restores_mean=True)
    problem = layer_problem(rows, moments, damping=0.1, ridge=1.0)
    assert float((problem.latent[0] - rows).abs().max()) < 0.1 * float(rows.abs().max())
    codes, error = problem.round(torch.tensor([0.1]), price=0.0)
    assert bool(error.isfinite().all())
    assert float(codes.abs().max()) < 100


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("adapted", [False, True])
def test_where_mean_outputs_are_restored_only_what_varies_counts(tile: int, adapted: bool) -> None:
    rows = seeded(12, 8, seed=5)
    moments, expected = with_and_without_means(rows, 1, adapted)
    weights = (Weight(rows, inputs=each) for each in (moments, expected))
    found, wanted = (SecondOrder(step=0.3, tile=tile).problem(each) for each in weights)
    torch.testing.assert_close(found.latent, wanted.latent, rtol=1e-3, atol=1e-3)
    assert found.factor is not None
    assert wanted.factor is not None
    torch.testing.assert_close(found.factor, wanted.factor, rtol=1e-3, atol=1e-3)
    assert (found.basis is None) == (tile == 1)


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("alike", [False, True], ids=["own inputs", "the same inputs"])
def test_problems_of_several_layers_about_their_means(alike: bool, adapted: bool, tile: int) -> None:
    rows = torch.stack([mixed(10, 12, seed=seed) for seed in range(3)])
    seeds = [0, 0, 0] if alike else [0, 1, 2]
    pairs = zip(rows, seeds, strict=True)
    moments = [with_and_without_means(weight, 1, adapted, seed)[0] for weight, seed in pairs]
    if alike:
        moments = [replace(each, second=moments[0].second) for each in moments]
    assert_alike(layer_problems(rows, moments, tile, 0.05), rows, moments, tile)


def test_directions_the_inputs_do_not_show_keep_their_weight() -> None:
    original = seeded(1, 300, 6)
    original[:, :, 4:] = 0.0
    rows = seeded(3, 6, seed=2)
    latent = layer_problem(rows, moments_of(1.5 * original, original, rows), None, 1e-4).latent[0]
    assert_close(latent[:, 4:], rows[:, 4:])
    assert relative_error(latent[:, :4], rows[:, :4] / 1.5) < 1e-3


def test_a_ridge_holds_the_weight_and_leaves_feedback_alone() -> None:
    """W + (M - W H)(H + r I)^-1 in float64, r a share of the mean diagonal; the factor has the damping."""
    original = seeded(1, 300, 6)
    inputs = original + 0.5 * seeded(1, 300, 6, seed=1)
    rows = seeded(3, 6, seed=2)
    moments = moments_of(inputs, original, rows)
    held = layer_problem(rows, moments, None, 0.01, 0.4)
    second, weight = moments.second[0].double(), rows.double()
    assert moments.cross is not None
    away = moments.cross[0].double() - weight @ second
    level = 0.4 * second.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    assert_close(held.latent[0], weight + torch.linalg.solve(second + level, away.T).T, torch.float32)
    free = layer_problem(rows, moments, None, 0.01)
    assert free.factor is not None
    assert held.factor is not None
    assert torch.equal(held.factor, free.factor)
    assert (held.latent[0] - rows).square().sum() < (free.latent[0] - rows).square().sum()


@pytest.mark.parametrize(
    ("positions", "expected"), [(0, 0.8), (40, 0.8), (8 * 6, 0.8), (16 * 6, 0.4), (800 * 6, 0.01)]
)
def test_more_positions_hold_the_weight_less(positions: int, expected: float) -> None:
    moments = replace(moments_of(seeded(1, 300, 6)), positions=positions)
    assert held_by(0.01, 0.8, moments) == pytest.approx(expected)
    assert held_by(0.01, None, moments) == 0.01


@given(exponent=st.floats(-20.0, 20.0))
def test_scales_of_weights_are_close_and_take_one_bit_of_mantissa(exponent: float) -> None:
    weights = torch.tensor([2.0**exponent])
    scale = float(scales_of_weights(weights))
    assert 0.79 < scale * 2.0 ** (exponent / 2) < 1.25
    mantissa, _ = frexp(scale)
    assert mantissa in (0.5, 0.75)


# -- rounding at several steps -----------------------------------------------------------------------


@pytest.mark.parametrize("with_moments", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_several_steps_at_once_are_each_on_its_own(groups: int, with_moments: bool) -> None:
    inputs = torch.stack([mixed(500, 12, seed=seed) for seed in range(groups)])
    moments = moments_of(inputs) if with_moments else None
    rows = seeded(6 * groups, 12)
    posed = layer_problem(rows, moments)
    steps = torch.tensor([0.1, 0.4, 1.5])
    codes, errors = posed.round(steps)
    for index in range(3):
        alone, error = posed.round(steps[index : index + 1])
        assert torch.equal(codes[index], alone[0])
        torch.testing.assert_close(errors[index], error[0])
        wrong = (posed.latent - codes[index] * steps[index]).double()
        second = torch.eye(12, dtype=torch.float64) if moments is None else moments.second.double()
        level = 0.03 * second.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        damped = second if moments is None else second + level * torch.eye(12)
        torch.testing.assert_close(
            float(errors[index]), float(((wrong @ damped) * wrong).sum()), rtol=1e-4, atol=0.0
        )


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("groups", [1, 3])
def test_columns_are_rounded_in_their_order_and_put_back(groups: int, tile: int) -> None:
    inputs = torch.stack([mixed(500, 12, seed=seed) for seed in range(groups)])
    moments, rows = moments_of(inputs), seeded(6 * groups, 12)
    basis = tile_basis(rows, tile, moments.second) if tile > 1 else None
    posed = layer_problem(rows, moments, basis)
    matrix = torch.eye(12) if basis is None else torch.block_diag(*[basis.matrix()] * 3)
    (order,) = rounding_order(matrix.T @ moments.second @ matrix, 0.03)
    assert posed.order is not None
    assert torch.equal(posed.order, order)
    assert order.tolist() != list(range(12))
    step = torch.tensor([0.4])
    found, error = posed.round(step, price=0.0)
    assert posed.factor is not None
    codes, left = round_with_feedback(posed.latent[:, :, order], posed.factor, step)
    assert torch.equal(found[0][:, :, order], codes)
    torch.testing.assert_close(error[0], left.sum())


def test_columns_are_rounded_from_first_to_last_where_they_are_not_reordered() -> None:
    moments, rows, step = moments_of(mixed(500, 12)[None]), seeded(6, 12), torch.tensor([0.4])
    expected, _ = round_with_feedback(rows[None], feedback_factor(moments.second, 0.03), step)
    for posed in (
        layer_problem(rows, moments, reorder=False),
        layer_problems(rows[None], [moments], reorder=False)[0],
    ):
        assert torch.equal(posed.round(step, price=0.0)[0][0], expected)
    assert not torch.equal(layer_problem(rows, moments).round(step, price=0.0)[0][0], expected)


def test_the_order_leaves_less_error_at_the_same_step() -> None:
    step, gains = torch.tensor([0.4]), []
    for seed in range(20):
        moments, rows = moments_of(mixed(500, 24, seed)[None]), seeded(200, 24, seed=seed + 99)
        posed = layer_problem(rows, moments)
        _, error = posed.round(step)
        _, before = replace(posed, order=None, factor=feedback_factor(moments.second, 0.03)).round(step)
        gains.append(float(error / before))
    assert sum(gains) / len(gains) < 0.95


@pytest.mark.parametrize("trellis", [0, 8])
@pytest.mark.parametrize("alike", [False, True], ids=["own inputs", "the same inputs"])
def test_problems_rounded_at_once_have_orders_of_their_own(alike: bool, trellis: int) -> None:
    rows = torch.stack([mixed(24, 12, seed=seed) for seed in range(3)])
    one = moments_of(mixed(400, 12, 5)[None])
    moments = [one if alike else moments_of(mixed(400, 12, seed + 5)[None]) for seed in range(3)]
    problems = layer_problems(rows, moments)
    steps = torch.tensor([[0.3, 0.6]]).expand(3, 2)
    codes, errors = round_many(problems, steps, trellis=trellis)
    for index, problem in enumerate(problems):
        alone, error = problem.round(steps[index], trellis=trellis)
        assert torch.equal(codes[index], alone[:, 0])
        torch.testing.assert_close(errors[index], error)


def test_error_grows_and_codes_shrink_with_the_step() -> None:
    posed = layer_problem(seeded(30, 16), moments_of(mixed(800, 16)[None]))
    codes, errors = posed.round(torch.tensor([0.05, 0.1, 0.2, 0.4, 0.8, 1.6]))
    assert (errors[1:] > errors[:-1]).all()
    counts = codes.flatten(1).count_nonzero(1)
    assert (counts[1:] < counts[:-1]).all()


def test_a_price_buys_fewer_codes_for_more_error() -> None:
    posed = layer_problem(seeded(60, 16), moments_of(mixed(800, 16)[None]))
    step = torch.tensor([0.8])
    plain_codes, plain_error = posed.round(step, 0.0)
    codes, error = posed.round(step, 0.3)
    assert codes.count_nonzero() < plain_codes.count_nonzero()
    assert error > plain_error


def test_a_basis_is_its_codes_times_one_scale() -> None:
    basis = tile_basis(seeded(20, 18), 9)
    assert isinstance(basis, Basis)
    assert basis.codes.dtype == torch.int8
    assert basis.scale.shape == (1, 1)
    assert int(basis.codes.abs().max()) == 127
    assert torch.equal(basis.matrix(), basis.codes.float() * basis.scale.float())


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("corner", [1.0, -5.0])
def test_problems_of_several_layers_are_those_of_each(tile: int, adapted: bool, corner: float) -> None:
    """Also beside a layer that sees nothing, one that sees little, and one whose moments are not positive."""
    rows = torch.stack([mixed(10, 12, seed=seed) for seed in range(5)])
    inputs = [mixed(300, 12, seed, unit)[None] for seed, unit in enumerate((1.0, 0.0, 1e-3, 1.0, 2.0))]
    others = [
        (each + 0.1 * mixed(300, 12, 7)[None], weight) for each, weight in zip(inputs, rows, strict=True)
    ]
    moments = [
        moments_of(each, *(other if adapted else ())) for each, other in zip(inputs, others, strict=True)
    ]
    odd = moments[3].second.clone()
    odd[0, 0, 0] *= corner
    moments[3] = replace(moments[3], second=odd)
    assert_alike(layer_problems(rows, moments, tile, 0.05), rows, moments, tile)


@pytest.mark.parametrize("tile", [1, 4])
@pytest.mark.parametrize("adapted", [False, True])
def test_problems_of_layers_with_the_same_inputs_are_those_of_each(tile: int, adapted: bool) -> None:
    rows, inputs = torch.stack([mixed(10, 12, seed=seed) for seed in range(3)]), mixed(300, 12)[None]
    original = inputs + 0.1 * mixed(300, 12, 7)[None]
    moments = [moments_of(inputs, *((original, weight) if adapted else ())) for weight in rows]
    moments = [replace(each, second=moments[0].second) for each in moments]
    assert_alike(layer_problems(rows, moments, tile, 0.05), rows, moments, tile)


def assert_alike(
    found: Sequence[LayerProblem], rows: Tensor, moments: Sequence[LayerMoments], tile: int
) -> None:
    """Problems posed at once, against each posed alone."""
    for problem, weight, of_one in zip(found, rows, moments, strict=True):
        of_one = of_one.about_mean(weight)
        basis = tile_basis(weight, tile, of_one.second) if tile > 1 else None
        alone = layer_problem(weight, of_one, basis, 0.05)
        assert problem.latent.shape == alone.latent.shape
        if basis is not None:
            assert problem.basis is not None
            assert torch.equal(problem.basis.codes, basis.codes)
            assert torch.equal(problem.basis.scale, basis.scale)
        torch.testing.assert_close(problem.latent, alone.latent, rtol=1e-4, atol=1e-5)
        assert problem.factor is not None
        assert problem.order is not None
        assert alone.order is not None
        assert torch.equal(problem.order, alone.order)
        torch.testing.assert_close(
            problem.factor, alone.factor, rtol=1e-3, atol=1e-4 * problem.factor.abs().max()
        )
        for size in ("rms", "largest", "mean_importance"):
            assert getattr(problem, size) == pytest.approx(getattr(alone, size), rel=1e-4)


def test_restored_values_are_as_long_along_the_original() -> None:
    problem = LayerProblem(seeded(1, 40, 30), None, None)
    step = 1.3
    codes, _ = problem.round(torch.tensor([step]), price=0.15)
    stored = step * codes[0]
    before = float((problem.latent * stored).sum() / problem.latent.square().sum())
    factor = restoring_factor(problem.latent, codes[0], step)
    assert before < 0.95
    assert factor * before == pytest.approx(1.0)


def test_restoring_has_limits() -> None:
    values = seeded(1, 20, 10)
    few = torch.where(values.abs() == values.abs().max(), values.sign(), 0.0)
    assert restoring_factor(values, torch.zeros_like(values), 1.0) == 1.0
    assert restoring_factor(values, few, 1.0) == 2.0
    assert restoring_factor(values, 2 * values, 1.0) == 1.0


def test_expected_feedback_is_the_same_whether_its_noise_is_kept_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = seeded(24, 16)
    moments = LayerMoments(torch.eye(16)[None] + 1, torch.zeros(1, 16), None, torch.zeros(1, 16))
    problem = layer_problem(rows, moments)
    found = [problem._with_feedback_noise(rows[None]) for _ in range(2)]
    monkeypatch.setattr("factorpack.solve.layer_problem.KEPT_NOISE", 24 * 16 - 1)
    drawn = problem._with_feedback_noise(rows[None])
    assert all(torch.equal(each, drawn) for each in found)
    assert not torch.equal(drawn, rows[None])
