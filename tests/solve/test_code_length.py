"""Code lengths while rounding: the choice each price makes, and where the lengths come from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from factorpack.solve.code_length import CLASSES, HIGH_RATE, REACH, CodeLengths, fit_lengths
from tests.helpers import seeded


def priced(values: Tensor, price: float) -> CodeLengths:
    return fit_lengths(values, price)


def laplacian(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return (-scale * uniform.sign() * (1 - 2 * uniform.abs()).log()).float()


def bits_of(lengths: CodeLengths, codes: Tensor) -> Tensor:
    """What each code costs, looked up one by one, for codes within REACH."""
    found = torch.empty_like(codes)
    for batch in range(codes.shape[0]):
        for row in range(codes.shape[1]):
            for column in range(codes.shape[2]):
                kind = int(lengths.row_class[batch, row] + lengths.column_class[batch, column])
                kind = min(max(kind, 0), CLASSES - 1)
                found[batch, row, column] = lengths.table[batch, kind, REACH + int(codes[batch, row, column])]
    return found


def test_at_no_price_rounding_is_to_nearest() -> None:
    values = laplacian(2, 30, 40, scale=3.0)
    lengths = priced(values, 0.0)
    assert torch.equal(lengths.round_all(values), values.round())
    for column in range(40):
        assert torch.equal(lengths(column, values[:, :, column]), values[:, :, column].round())


@given(
    seed=st.integers(0, 1000),
    price=st.sampled_from([0.01, HIGH_RATE, 0.5, 3.0]),
    scale=st.sampled_from([0.2, 1.0, 6.0]),
)
def test_the_choice_is_the_cheaper_of_the_two_candidates(seed: int, price: float, scale: float) -> None:
    """Nearest, and the neighbour of it nearer to zero: the least (v - q)^2 + price * bits."""
    values = laplacian(2, 6, 5, scale=scale, seed=seed).clamp(-60, 60)
    lengths = priced(values, price)
    near = values.round()
    inner = near - near.sign()
    cost_near = (values - near).square() + price * bits_of(lengths, near)
    cost_inner = (values - inner).square() + price * bits_of(lengths, inner)
    found = lengths.round_all(values)
    assert ((found == near) | (found == inner)).all()
    taken = torch.where(found == near, cost_near, cost_inner)
    torch.testing.assert_close(taken, torch.minimum(cost_near, cost_inner), rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 1000), low=st.floats(0, 2), more=st.floats(0, 2))
def test_a_higher_price_never_makes_codes_larger(seed: int, low: float, more: float) -> None:
    values = laplacian(1, 12, 10, scale=2.0, seed=seed)
    lengths = priced(values, low)
    dearer = CodeLengths(lengths.table, lengths.row_class, lengths.column_class, lengths.price + more)
    cheap, dear = lengths.round_all(values).abs(), dearer.round_all(values).abs()
    assert (dear <= cheap).all()
    assert dear.count_nonzero() <= cheap.count_nonzero()


def test_a_higher_price_makes_fewer_nonzero_codes_when_lengths_follow() -> None:
    values = laplacian(1, 60, 60, scale=0.8)
    counts = [
        int(priced(values, price).round_all(values).count_nonzero())
        for price in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < 0.8 * counts[0]


@given(seed=st.integers(0, 1000), price=st.sampled_from([0.0, HIGH_RATE, 1.0]))
def test_column_by_column_is_all_at_once(seed: int, price: float) -> None:
    values = laplacian(2, 9, 7, scale=4.0, seed=seed)
    lengths = priced(values, price)
    whole = lengths.round_all(values)
    for column in range(7):
        assert torch.equal(lengths(column, values[:, :, column]), whole[:, :, column])


def test_column_by_column_is_all_at_once_for_wide_codes() -> None:
    values = 300.0 * seeded(1, 40, 20)
    lengths = priced(values, 2.0)
    whole = lengths.round_all(values)
    assert (values.abs() > REACH).float().mean() > 0.5
    for column in range(20):
        assert torch.equal(lengths(column, values[:, :, column]), whole[:, :, column])


@given(value=st.floats(REACH + 1, 30_000), price=st.floats(0, 1e5))
def test_beyond_reach_rounding_is_to_nearest(value: float, price: float) -> None:
    rising = torch.arange(-REACH, REACH + 1, dtype=torch.float64).abs().expand(1, CLASSES, -1)
    lengths = CodeLengths(rising, torch.zeros(1, 1).long(), torch.zeros(1, 1).long(), price)
    values = torch.full((1, 1, 1), value, dtype=torch.float64)
    assert torch.equal(lengths.round_all(values), values.round())
    assert torch.equal(lengths.round_all(-values), -values.round())


def test_a_class_trusts_its_own_counts() -> None:
    """Codes that are all +1 or -1 take one bit, not what a Laplacian of their mean magnitude would give."""
    values = seeded(1, 20, 20).sign()
    bits = priced(values, 0.0).table[0, CLASSES // 2, [REACH - 1, REACH, REACH + 1]]
    assert float(bits[[0, 2]].max()) < 1.1
    assert float(bits[1]) > 6


def test_a_class_with_few_codes_leans_on_a_laplacian() -> None:
    """Four values tell the mean magnitude, not that the codes between and beyond them never come."""
    bits = priced(torch.tensor([[[3.0, -3.0], [3.0, 3.0]]]), 0.0).table[
        0, CLASSES // 2, REACH - 4 : REACH + 5
    ]
    assert float(bits.max()) < 8


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_groups_are_priced_as_the_whole_is(groups: int) -> None:
    values = laplacian(3, 12, 8, scale=1.5)
    lengths = fit_lengths(values, 0.1)
    expected = lengths.round_all(values)
    split = values.reshape(3 * groups, 12 // groups, 8)
    assert torch.equal(lengths.by_group(groups).round_all(split), expected.reshape_as(split))


def test_batches_do_not_mix() -> None:
    values = torch.cat([laplacian(1, 20, 10, scale=0.3), laplacian(1, 20, 10, scale=5.0, seed=1)])
    together = priced(values, 0.3).round_all(values)
    for one in (0, 1):
        assert torch.equal(
            together[one], priced(values[one : one + 1], 0.3).round_all(values[one : one + 1])[0]
        )


def test_lengths_are_of_codes_that_can_be_told_apart() -> None:
    """Kraft: a class's lengths belong to a prefix code, but for the floor of 2^-24 on each."""
    lengths = priced(laplacian(2, 50, 50, scale=2.0), HIGH_RATE)
    total = (-lengths.table.double()).exp2().sum(2)
    assert (total <= 1.0 + (2 * REACH + 1) * 2.0**-24).all()
    assert (total > 0.98).all()


def test_lengths_are_those_of_the_distribution() -> None:
    """One class, many numbers: the mean length is the entropy of what was counted."""
    values = laplacian(1, 1, 200_000, scale=1.0).reshape(1, 400, 500)
    lengths = priced(values, 0.0)
    codes = values.round()
    classes = (lengths.row_class[:, :, None] + lengths.column_class[:, None, :]).clamp(0, CLASSES - 1)
    entropy, mean = 0.0, 0.0
    for kind in classes.unique():
        own = codes[classes == kind]
        _, counts = own.unique(return_counts=True)
        shares = counts.double() / len(own)
        entropy -= len(own) * float((shares * shares.log2()).sum())
        mean += float(lengths.table[0, kind, REACH + own.long()].double().sum())
    assert entropy <= mean <= 1.002 * entropy


def test_loud_rows_and_columns_have_classes_of_their_own() -> None:
    values = laplacian(1, 40, 30)
    values[:, 3] *= 8.0
    values[:, :, 5] *= 4.0
    lengths = priced(values, 0.0)
    # Half octaves: 8 times is 6 classes up, 4 times is 4, give or take the rounding of a sample.
    rows, columns = lengths.row_class[0].float(), lengths.column_class[0].float()
    assert abs(float(rows[3] - rows.median()) - 6) <= 1
    assert abs(float(columns[5] - columns.median()) - 4) <= 1


def test_zeros_stay_zeros() -> None:
    values = torch.zeros(2, 3, 4)
    assert torch.equal(priced(values, 0.5).round_all(values), values)
