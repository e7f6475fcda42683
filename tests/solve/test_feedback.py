"""Error feedback, against its own theory in float64 and against a twin that goes column by column."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.solve import feedback
from factorpack.solve.feedback import (
    feedback_factor,
    inherited_variance,
    mean_diagonal,
    round_to_nearest,
    round_with_feedback,
    rounding_order,
)
from tests.helpers import assert_close, seeded


def moments(size: int, groups: int = 1, samples: int = 400, seed: int = 0) -> Tensor:
    """Second moments of correlated inputs: (groups, size, size), float64."""
    inputs = seeded(groups, samples, size, dtype=torch.float64, seed=seed)
    mixed = inputs @ seeded(groups, size, size, dtype=torch.float64, seed=seed + 1)
    return mixed.transpose(1, 2) @ mixed / samples


def damped(second: Tensor, damping: float) -> Tensor:
    """H + damping * mean(diag H) I, written out."""
    level = second.diagonal(dim1=1, dim2=2).mean(1)
    return second + damping * level[:, None, None] * torch.eye(second.shape[1], dtype=second.dtype)


def output_error(target: Tensor, codes: Tensor, step: Tensor, second: Tensor) -> Tensor:
    """tr(E H E^T), row by row: (batch, rows)."""
    error = target - codes * step[..., None]
    return ((error @ second) * error).sum(-1)


# -- the factor --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [1e-6, 0.01, 0.3])
@pytest.mark.parametrize(("groups", "size"), [(1, 1), (1, 17), (5, 9)])
def test_the_factor_squares_to_the_damped_inverse(groups: int, size: int, damping: float) -> None:
    second = moments(size, groups)
    factor = feedback_factor(second, damping)
    assert torch.equal(factor, factor.triu())
    assert (factor.diagonal(dim1=1, dim2=2) > 0).all()
    product = factor.transpose(1, 2) @ factor @ damped(second, damping)
    torch.testing.assert_close(product, torch.eye(size, dtype=torch.float64).expand_as(product))


def test_a_group_without_inputs_is_finite_and_leaves_the_others_alone() -> None:
    second = moments(6, 3)
    second[1] = 0.0
    factor = feedback_factor(second, 0.01)
    assert factor.isfinite().all()
    for group in (0, 2):
        assert_close(factor[group], feedback_factor(second[group : group + 1], 0.01)[0])
    level = mean_diagonal(second).diagonal(dim1=1, dim2=2)
    assert (level > 0).all()
    assert level[1].max() < 1e-3 * level[[0, 2]].min()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_that_are_all_zero(dtype: torch.dtype) -> None:
    factor = feedback_factor(torch.zeros(2, 4, 4, dtype=dtype))
    assert factor.isfinite().all()
    target = seeded(2, 3, 4, dtype=dtype)
    codes, error = round_with_feedback(target, factor, torch.tensor(0.25, dtype=dtype))
    assert torch.equal(codes, (target / 0.25).round())
    assert error.isfinite().all()


def test_fewer_samples_than_inputs_in_single_precision() -> None:
    """The sum of a few outer products is singular: damping must do."""
    second = moments(64, samples=8).float()
    factor = feedback_factor(second)
    assert factor.isfinite().all()
    inverse = torch.linalg.inv(damped(second.double(), 0.01))
    assert ((factor.double().transpose(1, 2) @ factor.double() - inverse).norm() / inverse.norm()) < 1e-3


def test_more_damping_where_the_matrix_is_not_definite() -> None:
    """Rounded sums may have a negative eigenvalue."""
    second = moments(6)
    values, vectors = torch.linalg.eigh(second)
    values[:, 0] = -0.05 * second.diagonal(dim1=1, dim2=2).mean(1)
    second = vectors * values[:, None] @ vectors.transpose(1, 2)
    factor = feedback_factor(second, 0.01)
    inverse = factor.transpose(1, 2) @ factor
    assert_close(inverse, torch.linalg.inv(damped(second, 0.1)))


# -- the order of the columns -------------------------------------------------------------------------


def unexplained(inputs: Tensor) -> Tensor:
    """The mean square of each input, (groups, samples, K), that regression on the others leaves: (groups, K)."""
    size, left = inputs.shape[2], []
    for column in range(size):
        others = [each for each in range(size) if each != column]
        fit = torch.linalg.lstsq(inputs[:, :, others], inputs[:, :, [column]]).solution
        left.append((inputs[:, :, [column]] - inputs[:, :, others] @ fit).square().mean((1, 2)))
    return torch.stack(left, 1)


@pytest.mark.parametrize("groups", [1, 3])
def test_columns_that_the_others_tell_least_about_come_first(groups: int) -> None:
    inputs = seeded(groups, 500, 7, dtype=torch.float64) @ seeded(groups, 7, 7, dtype=torch.float64, seed=1)
    order = rounding_order(inputs.transpose(1, 2) @ inputs / 500, 1e-9)
    expected = unexplained(inputs).mean(0).argsort(descending=True)
    assert order.tolist() == [expected.tolist()]
    assert sorted(order[0].tolist()) == list(range(7))


def test_the_orders_of_several_layers_are_those_of_each() -> None:
    second = moments(6, 4)
    both = rounding_order(second, 0.03, layers=2)
    assert torch.equal(both, torch.cat([rounding_order(second[:2], 0.03), rounding_order(second[2:], 0.03)]))


def test_inputs_that_are_alike_or_never_there_stay_in_their_order() -> None:
    for second in (torch.eye(5), torch.zeros(5, 5)):
        assert rounding_order(second[None]).tolist() == [[0, 1, 2, 3, 4]]


def test_the_order_makes_the_error_smaller() -> None:
    """The costs of the columns have the same product in any order, and in this one a smaller sum."""
    gains = []
    for seed in range(40):
        second = moments(16, seed=seed)
        (order,) = rounding_order(second, 1e-3)
        before, after = (
            feedback_factor(each, 1e-3).diagonal(dim1=1, dim2=2).pow(-2)
            for each in (second, second[:, order][:, :, order])
        )
        torch.testing.assert_close(before.log().sum(), after.log().sum())
        gains.append(float(after.sum() / before.sum()))
    assert sum(gains) / len(gains) < 0.9
    assert max(gains) < 1.1


# -- rounding ----------------------------------------------------------------------------------------


def twin(target: Tensor, second: Tensor, damping: float, step: Tensor) -> tuple[Tensor, Tensor]:
    """The same by solving, after each column, for the columns left: no factor, no blocks.

    With column j fixed at an error of r, the rest that leaves the least output error moves by
    -r H_jR (H_RR)^-1.
    """
    codes = torch.zeros_like(target)
    for batch, whole in enumerate(damped(second, damping)):
        left = target[batch].clone()
        for j in range(left.shape[1]):
            codes[batch, :, j] = (left[:, j] / step[batch]).round()
            residue = left[:, j] - codes[batch, :, j] * step[batch]
            rest = slice(j + 1, None)
            if j + 1 < left.shape[1]:
                left[:, rest] += residue[:, None] * torch.linalg.solve(whole[rest, rest], whole[rest, j])
    return codes, output_error(target, codes, step, damped(second, damping))


@pytest.mark.parametrize("block", [1, 3, 128])
def test_codes_and_error_are_the_slow_twin_s(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(feedback, "BLOCK", block)
    second, target = moments(11, 2), seeded(2, 5, 11, dtype=torch.float64)
    step = torch.tensor([[0.3] * 5, [0.1, 0.2, 0.3, 0.4, 0.5]], dtype=torch.float64)
    codes, error = round_with_feedback(target, feedback_factor(second, 0.02), step)
    expected, expected_error = twin(target, second, 0.02, step)
    assert torch.equal(codes, expected)
    torch.testing.assert_close(error, expected_error)


@given(
    size=st.integers(1, 40),
    block=st.integers(1, 41),
    groups=st.integers(1, 3),
    seed=st.integers(0, 1000),
    damping=st.sampled_from([1e-4, 0.01, 0.5]),
)
def test_the_error_is_that_of_the_output_whatever_the_block(
    size: int, block: int, groups: int, seed: int, damping: float
) -> None:
    second = moments(size, groups, seed=seed)
    target = seeded(groups, 4, size, dtype=torch.float64, seed=seed + 7)
    step = torch.full((groups, 4), 0.4, dtype=torch.float64)
    factor = feedback_factor(second, damping)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feedback, "BLOCK", block)
        codes, error = round_with_feedback(target, factor, step)
    assert torch.equal(codes, codes.round())
    torch.testing.assert_close(error, output_error(target, codes, step, damped(second, damping)))
    assert torch.equal(codes, round_with_feedback(target, factor, step)[0])


@given(seed=st.integers(0, 1000), rounding_up=st.booleans())
def test_the_error_is_that_of_any_rounding(seed: int, rounding_up: bool) -> None:
    second, target = moments(8, seed=seed), seeded(1, 3, 8, dtype=torch.float64, seed=seed)
    step = torch.full((1, 3), 0.4, dtype=torch.float64)

    def rounding(column: int, values: Tensor) -> Tensor:
        return values.ceil() if rounding_up else (values.round() if column % 2 else torch.zeros_like(values))

    codes, error = round_with_feedback(target, feedback_factor(second, 0.01), step, rounding)
    torch.testing.assert_close(error, output_error(target, codes, step, damped(second, 0.01)))


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    target = seeded(1, 6, 20, dtype=torch.float64)
    factor = feedback_factor(torch.eye(20, dtype=torch.float64)[None], 0.01)
    codes, error = round_with_feedback(target, factor, torch.tensor(0.3, dtype=torch.float64))
    assert torch.equal(codes, round_to_nearest(0, target / 0.3))
    torch.testing.assert_close(error, 1.01 * (target - 0.3 * codes).square().sum(-1))


def test_the_target_is_not_changed() -> None:
    target = seeded(1, 3, 9, dtype=torch.float64)
    before = target.clone()
    round_with_feedback(target, feedback_factor(moments(9)), torch.tensor(0.5, dtype=torch.float64))
    assert torch.equal(target, before)


def test_feedback_is_never_worse_than_plain_rounding_on_average() -> None:
    """Not row by row, but over a hundred rows of each of many problems, and far better where inputs correlate."""
    gains = []
    for seed in range(40):
        second = moments(16, seed=seed)
        target = seeded(1, 100, 16, dtype=torch.float64, seed=seed + 500)
        step = torch.full((1, 100), 0.5, dtype=torch.float64)
        codes, _ = round_with_feedback(target, feedback_factor(second, 1e-3), step)
        fed = output_error(target, codes, step, second).sum()
        plain = output_error(target, (target / 0.5).round(), step, second).sum()
        assert fed <= plain
        gains.append(float(fed / plain))
    assert sum(gains) / len(gains) < 0.7


def test_at_fine_steps_the_error_is_a_twelfth_of_the_importance() -> None:
    """Residues are uniform: tr(E H E^T) = step^2 / 12 * sum_j 1 / U_jj^2."""
    second = moments(12)
    factor = feedback_factor(second, 1e-3)
    target = 100 * seeded(1, 4000, 12, dtype=torch.float64)
    _, error = round_with_feedback(target, factor, torch.ones(1, 4000, dtype=torch.float64))
    importance = factor.diagonal(dim1=1, dim2=2).pow(-2).sum()
    # Twelve uniform residues a row: the mean of 4,000 rows is known to about a percent.
    assert abs(float(error.mean() / (importance / 12)) - 1.0) < 0.05


def test_columns_take_over_the_errors_of_those_before_them() -> None:
    """For values many steps apart, whose rounding errors have a variance of a twelfth."""
    size, rows = 12, 20_000
    inputs = seeded(600, size) @ (seeded(size, size, seed=1) + 2 * torch.eye(size))
    factor = feedback_factor((inputs.T @ inputs / 600)[None])
    values = 50.0 * seeded(1, rows, size, seed=2)
    met = torch.empty_like(values)

    def watched(column: int, numbers: Tensor) -> Tensor:
        met[:, :, column] = numbers
        return numbers.round()

    round_with_feedback(values, factor, torch.ones(1, 1), watched)
    found = (met - values).var(1)
    torch.testing.assert_close(found, inherited_variance(factor) / 12, rtol=0.05, atol=1e-4)
