"""The rate term: bits as the codes' own histogram tells them, with a slope that leads to cheaper ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import factorpack as fp
from factorpack.decoding import decode
from factorpack.quantize.uniform import code_range
from factorpack.tune.rate import LengthTable, RateTerm, fit_table
from factorpack.tune.trainable import QuantizedRows
from factorpack.tune.trim import remove_dead_rows, trim
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_encoded, assert_same_tensor, seeded


def bell(rows: int, columns: int, bits: int, width: float, seed: int = 0) -> Tensor:
    """Codes whose histograms fall on both sides of zero, the rows unlike each other."""
    low, high = code_range(bits)
    widths = width * torch.linspace(1, 2, rows)[:, None]
    return (widths * seeded(rows, columns, seed=seed)).round().clamp(low, high).to(torch.int8)


def entropy_bits(codes: list[int]) -> float:
    total = len(codes)
    return -sum(count * math.log2(count / total) for count in Counter(codes).values())


def in_float64(table: LengthTable) -> LengthTable:
    return replace(table, lengths=table.lengths.double())


# -- tables ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 9, 32])
def test_a_row_s_code_length_is_its_empirical_entropy(rows: int) -> None:
    codes = bell(rows, 4000, 4, 0.7)
    table, entropy = fit_table(codes, 4)
    assert table.lengths.shape == (rows, 16)
    expected = [entropy_bits(row) for row in codes.tolist()]
    assert entropy.item() == pytest.approx(sum(expected), rel=1e-12)
    found = table.at(codes.float()).sum(1)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)  # FP32 tables


def test_many_rows_share_tables_with_rows_like_them() -> None:
    codes = bell(200, 400, 3, 0.4)
    table, entropy = fit_table(codes, 3)
    assert table.lengths.shape == (16, 8)
    groups = [codes[table.group_of == group].reshape(-1).tolist() for group in range(16)]
    assert entropy.item() == pytest.approx(sum(map(entropy_bits, groups)), rel=1e-12)
    sizes = codes.float().abs().mean(1)
    largest = [sizes[table.group_of == group].max().item() for group in range(16)]
    assert largest == sorted(largest)


def test_few_codes_share_one_table() -> None:
    assert fit_table(bell(9, 20, 8, 20.0), 8)[0].lengths.shape == (1, 256)


def gapped(_: int) -> Tensor:
    return torch.tensor([[0] * 300 + [7] * 60 + [-8] * 9 + [3] * 2], dtype=torch.int8)


@pytest.mark.parametrize(
    "codes", [bell(5, 3000, 4, 1.0), bell(3, 8000, 4, 4.0), gapped(0), torch.zeros(4, 99, dtype=torch.int8)]
)
def test_tables_rise_away_from_their_cheapest_code(codes: Tensor) -> None:
    lengths = fit_table(codes, 4)[0].lengths
    for row in lengths:
        cheapest = int(row.argmin())
        steps = row.diff()
        assert (steps[cheapest:] > 0.06).all()  # a sixteenth, rounded to FP32
        assert (steps[:cheapest] < -0.06).all()


def test_wide_codes_are_smoothed() -> None:
    """Noise in single counts is larger than the slope they are there to tell."""
    codes = (24 * seeded(1, 20000)).round().clamp(-128, 127).to(torch.int8)
    table, entropy = fit_table(codes, 8)
    slopes = table.lengths[0].diff()[128 : 128 + 48]
    expected = (torch.arange(48) + 0.5) / 24**2 / math.log(2)  # of a Gaussian's logarithm
    # Neighbouring windows of 13 codes differ in one count each; at two deviations a count is least sure.
    count = 20000 * math.exp(-2) / (24 * math.sqrt(2 * math.pi))
    noise = math.sqrt(2 * count) / (13 * count) / math.log(2)
    assert (slopes - expected).abs().max().item() < 4 * noise
    assert table.at(codes.float()).sum().item() == pytest.approx(entropy.item(), rel=0.02)


def test_codes_of_sixteen_bits() -> None:
    codes = (2000 * seeded(3, 500)).round().to(torch.int16)
    table, entropy = fit_table(codes, 16)
    assert table.lengths.shape == (1, 65536)
    assert entropy.item() == pytest.approx(entropy_bits(codes.reshape(-1).tolist()), rel=1e-12)
    assert bool(table.at(codes.float()).isfinite().all())


# -- gradients ---------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_interpolated_table() -> None:
    """With respect to the numbers and to the scales, against differences in float64."""
    rows = QuantizedRows(bell(6, 4000, 6, 2.5), torch.full((6, 1), 0.125), 6).double()
    rows.scale_dtype = torch.float64  # the stored scale is then the one that learns, without rounding
    table = in_float64(fit_table(rows.codes(), 6)[0])
    with torch.no_grad():
        rows.numbers.add_(0.02 * seeded(6, 4000, dtype=torch.float64, seed=1))
        rows.growth.add_(0.1 * seeded(6, 1, dtype=torch.float64, seed=2))
    assert code_range(6)[0] < rows.unit().min() < rows.unit().max() < code_range(6)[1]
    rows.stored_scale = lambda: rows.first_scale * rows.growth.exp()  # type: ignore[method-assign]
    table.at(rows.unit()).sum().backward()

    def bits() -> Tensor:
        with torch.no_grad():
            return table.at(rows.unit()).sum(1, keepdim=True)

    for parameter, step in ((rows.numbers, 1e-9), (rows.growth, 1e-9)):
        direction = seeded(*parameter.shape, dtype=torch.float64, seed=3)
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            ahead = bits()
            parameter.sub_(direction, alpha=2 * step)
            behind = bits()
            parameter.add_(direction, alpha=step)
        assert parameter.grad is not None
        expected = (parameter.grad * direction).sum(1, keepdim=True)
        torch.testing.assert_close((ahead - behind) / (2 * step), expected, rtol=1e-3, atol=1e-2)


def test_it_pulls_to_cheaper_codes_and_scales_up() -> None:
    rows = QuantizedRows(bell(4, 3000, 4, 1.5), torch.full((4, 1), 0.5), 4)
    with torch.no_grad():
        rows.numbers.add_(0.02 * seeded(4, 3000))
    RateTerm([rows], 12000)().backward()
    assert rows.numbers.grad is not None
    assert rows.growth.grad is not None
    unit = rows.unit().detach()
    assert (rows.numbers.grad.sign() == unit.sign())[unit != 0].all()
    assert (rows.growth.grad < 0).all()


def test_beyond_the_range_the_slope_leads_back() -> None:
    table, _ = fit_table(bell(1, 3000, 3, 1.0), 3)
    unit = torch.tensor([[-9.0, 30.0]], requires_grad=True)
    bits = table.at(unit)
    assert_same_tensor(bits.detach(), table.lengths[:, [0, 7]])
    bits.sum().backward()
    assert unit.grad is not None
    assert unit.grad[0, 0] < 0 < unit.grad[0, 1]


def test_zeros_that_are_frozen_are_left_alone() -> None:
    codes = bell(3, 2000, 4, 1.0)
    rows = QuantizedRows(codes, torch.ones(3, 1), 4, codes != 0)
    RateTerm([rows], 6000)().backward()
    assert rows.numbers.grad is not None
    assert not rows.numbers.grad[codes == 0].any()
    assert rows.numbers.grad[codes != 0].all()


def test_a_scale_of_zero() -> None:
    rows = QuantizedRows(torch.zeros(2, 300, dtype=torch.int8), torch.tensor([[0.0], [1.0]]), 4)
    RateTerm([rows], 600)().backward()
    assert all(bool(each.grad.isfinite().all()) for each in rows.parameters() if each.grad is not None)


def test_bits_a_weight() -> None:
    """All codes together, per weight that they represent."""
    parts = [QuantizedRows(bell(2, 5000, 4, 1.0, seed), torch.ones(2, 1), 4) for seed in (0, 1)]
    term = RateTerm(parts, 40000)
    expected = sum(entropy_bits(row) for rows in parts for row in rows.codes().tolist())
    assert term().item() * 40000 == pytest.approx(expected, rel=1e-5)
    assert term.refresh() == pytest.approx(expected, rel=1e-12)


def test_tables_from_a_checkpoint() -> None:
    rows = QuantizedRows(bell(2, 5000, 4, 1.0), torch.ones(2, 1), 4)
    term = RateTerm([rows], 10000)
    state, before = term.state(), term().item()
    with torch.no_grad():
        rows.numbers.mul_(2)
    fresh = RateTerm([rows], 10000)
    assert fresh().item() != term().item()
    fresh.load(state)
    assert fresh().item() == term().item() != before


# -- trimming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1])
def test_trimming_saves_what_it_is_asked_for(share: float) -> None:
    rows = [QuantizedRows(bell(4, 5000, 4, width), torch.ones(4, 1), 4) for width in (0.4, 0.7)]
    with torch.no_grad():
        for index, each in enumerate(rows):
            each.numbers.add_(0.01 * seeded(4, 5000, seed=index))
    before = [each.codes() for each in rows]
    tables = [fit_table(codes, 4)[0] for codes in before]
    term = RateTerm(rows, 40000)
    start = term.refresh()
    moved = trim(rows, share * start)
    assert start - term.refresh() >= share * start  # entropy is concave: no less than its slope says
    after = [each.codes() for each in rows]
    told = [
        (table.at(a.float()) - table.at(b.float())).double().sum().item()
        for table, a, b in zip(tables, before, after, strict=True)
    ]
    most = max(table.lengths.diff().abs().max().item() for table in tables)
    assert share * start <= sum(told) * (1 + 1e-6) <= share * start + most + 0.1
    changes = [a.int() - b.int() for a, b in zip(after, before, strict=True)]
    assert sum(int(change.count_nonzero()) for change in changes) == moved
    assert all(int(change.abs().max()) <= 1 for change in changes)
    assert all((a.abs() <= b.abs()).all() for a, b in zip(after, before, strict=True))


def test_those_go_first_that_lose_least() -> None:
    rows = QuantizedRows(torch.tensor([[0] * 60 + [1] * 20], dtype=torch.int8), torch.ones(1, 1), 3)
    with torch.no_grad():
        rows.numbers[0, 60:] = torch.linspace(0.55, 1.45, 20) / 32
    assert trim([rows], 0.1) == 1
    assert rows.codes()[0, 59:63].tolist() == [0, 0, 1, 1]


def test_codes_under_a_mask_stay() -> None:
    """A mean code that is not zero draws zeros to it, but not those that a threshold made."""
    codes = torch.tensor([[0] * 10 + [2] * 90], dtype=torch.int8)
    rows = QuantizedRows(codes, torch.ones(1, 1), 3, codes != 0)
    assert trim([rows], 1e9) == 0
    assert_same_tensor(rows.codes(), codes)


# -- dead rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["row", "column"])
@pytest.mark.parametrize("dead", [[0], [1, 4, 8], list(range(9)), []])
def test_dead_rows_are_removed(scales: str, dead: list[int]) -> None:
    weight = seeded(48, 20)
    encoded = fp.QSPCA(9, 4, 0.2, tile=16, latent_scales=scales).encode(Weight(weight))  # type: ignore[arg-type]
    latent = encoded.parts["latent"].clone()
    latent[dead] = 0
    encoded = replace(encoded, parts={**encoded.parts, "latent": latent})
    found = remove_dead_rows(encoded)
    if not dead:
        assert_same_encoded(found, encoded)
        return
    rank = max(9 - len(dead), 1)
    assert found.parts["latent"].shape == (rank, 60)
    assert found.parts["codebook"].shape == (16, rank)
    assert found.parts["codebook_scale"].shape == (1, rank)
    assert found.parts["latent_scale"].shape == ((rank, 1) if scales == "row" else (1, 60))
    assert found.extra_zeros <= int((found.parts["latent"] == 0).sum())
    assert_close(decode(found), decode(encoded))
    exact = [
        (each.parts["codebook"].double() * each.parts["codebook_scale"].double())
        @ (each.parts["latent"].double() * each.parts["latent_scale"].double())
        for each in (found, encoded)
    ]
    torch.testing.assert_close(*exact, rtol=0, atol=1e-12)


def test_columns_of_zeros_go_as_rows_do() -> None:
    encoded = fp.QSPCA(9, 4, tile=16).encode(Weight(seeded(48, 20)))
    codebook = encoded.parts["codebook"].clone()
    codebook[:, 3] = 0
    encoded = replace(encoded, parts={**encoded.parts, "codebook": codebook})
    found = remove_dead_rows(encoded)
    assert found.parts["codebook"].shape == (16, 8)
    assert_close(decode(found), decode(encoded))


@pytest.mark.parametrize("method", [fp.Scalar(4), fp.Keep()])
def test_other_kinds_have_no_such_rows(method: fp.Scalar | fp.Keep) -> None:
    encoded = method.encode(Weight(torch.zeros(8, 8)))
    assert remove_dead_rows(encoded) is encoded
