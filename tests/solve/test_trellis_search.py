"""Rounding along a trellis: the best of all paths, two ways to find it, and what it is worth."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from factorpack.quantize.trellis import LONGEST, MEMORY, indices_of, machine, segment_rows
from factorpack.solve.code_length import CLASSES, HIGH_RATE, fit_lengths
from factorpack.solve.feedback import feedback_factor, round_with_feedback
from factorpack.solve.layer_problem import LayerProblem
from factorpack.solve.trellis_search import (
    FINE_STEP,
    MAGNITUDES,
    TrellisLengths,
    fit_trellis,
    path_by_halves,
    path_by_rows,
)
from tests.helpers import seeded

each_machine = pytest.mark.parametrize("states", MEMORY)


def plain_lengths(rows: int, columns: int, states: int, price: float = 0.4) -> TrellisLengths:
    """One class, and lengths that differ between the quantizers."""
    spots = torch.arange(MAGNITUDES, dtype=torch.float32)
    table = torch.stack([0.6 + 1.3 * spots, 0.9 + 1.1 * spots]).expand(1, CLASSES, 2, -1).contiguous()
    classes = torch.zeros(1, rows, dtype=torch.long), torch.zeros(1, columns, dtype=torch.long)
    return TrellisLengths(table, *classes, torch.zeros(1, columns, dtype=torch.bool), price, states)


def cost_of(levels: Tensor, values: Tensor, lengths: TrellisLengths) -> Tensor:
    """Squared error and bits of each column, from the indices a reader finds."""
    rows = levels.shape[1]
    indices, quantizer = indices_of(levels[0].numpy().astype(np.int64), lengths.states, segment_rows(rows))
    bits = lengths.table[0, 0][torch.from_numpy(quantizer).long(), torch.from_numpy(indices).abs().long()]
    return ((values[0] - levels[0]).square() + lengths.price * bits).sum(0)


def every_path(length: int, reach: int, states: int) -> tuple[Tensor, Tensor]:
    """All paths of indices up to `reach`: levels and quantizers, (paths, length)."""
    of = machine(states)
    indices = np.array(list(product(range(-reach, reach + 1), repeat=length)))
    state, levels, quantizers = np.zeros(len(indices), np.intp), [], []
    for place in range(length):
        quantizers.append(of.quantizer[state].astype(np.int64))
        levels.append(2 * indices[:, place] - quantizers[-1] * np.sign(indices[:, place]))
        state = of.after[state, indices[:, place] & 1].astype(np.intp)
    return torch.from_numpy(np.stack(levels, 1)), torch.from_numpy(np.stack(quantizers, 1))


@each_machine
def test_no_other_path_is_cheaper(states: int) -> None:
    length, columns = 5, 24
    values = 1.8 * seeded(1, length, columns)
    lengths = plain_lengths(length, columns, states)
    levels, quantizers = lengths.paths(values)
    every, of = every_path(length, 3, states)
    magnitudes = (every.abs() + of) // 2
    bits = lengths.table[0, 0][of, magnitudes].sum(1)
    for column in range(columns):
        best = ((values[0, :, column] - every).square().sum(1) + lengths.price * bits).min()
        own = (levels[0, :, column].abs() + quantizers[0, :, column]).long() // 2
        cost = (values[0, :, column] - levels[0, :, column]).square().sum()
        cost += lengths.price * lengths.table[0, 0][quantizers[0, :, column], own].sum()
        torch.testing.assert_close(cost, best)


@each_machine
@pytest.mark.parametrize(("rows", "paths"), [(1, 1), (2, 3), (37, 9), (64, 2), (100, 5), (128, 4)])
def test_both_searches_find_paths_of_one_cost(states: int, rows: int, paths: int) -> None:
    costs = seeded(4, rows, paths, dtype=torch.float64).square()
    of, sums = machine(states), []
    for search in (path_by_rows, path_by_halves):
        taken = search(costs, states)
        state = np.zeros(paths, np.intp)
        for row in taken.numpy():
            assert (row >> 1 == of.quantizer[state]).all()
            state = of.after[state, row & 1].astype(np.intp)
        sums.append(costs.gather(0, taken[None]).sum((0, 1)))
    torch.testing.assert_close(*sums)


@pytest.mark.parametrize("rows", [3, LONGEST, LONGEST + 1, 300])
def test_a_column_alone_and_all_at_once_are_paths_of_a_file(rows: int) -> None:
    """Equal in cost: the two searches may break ties differently."""
    values = 2.0 * seeded(1, rows, 7)
    lengths = plain_lengths(rows, 7, 8)
    whole = lengths.round_all(values)
    alone = torch.stack([lengths(column, values[:, :, column]) for column in range(7)], 2)
    torch.testing.assert_close(cost_of(whole, values, lengths), cost_of(alone, values, lengths))


def test_a_path_runs_through_all_groups() -> None:
    values = 2.0 * seeded(1, 12, 1)
    lengths = plain_lengths(12, 1, 4)
    whole = lengths(0, values[:, :, 0])
    grouped = lengths(0, values[:, :, 0].reshape(4, 3))
    assert torch.equal(grouped.flatten(), whole.flatten())


def test_quiet_columns_have_even_levels() -> None:
    values = 2.0 * seeded(1, 40, 6)
    quiet = torch.tensor([[True, False, True, False, False, True]])
    lengths = replace(plain_lengths(40, 6, 8, price=0.0), quiet=quiet)
    levels = lengths.round_all(values)
    assert torch.equal(levels[:, :, quiet[0]], 2 * (values[:, :, quiet[0]] / 2).round())
    assert (levels[:, :, ~quiet[0]] % 2 != 0).any(1).all()


def test_columns_of_zeros_are_quiet() -> None:
    values = torch.where(torch.arange(20) < 10, 0.1, 3.0) * seeded(1, 200, 20)
    assert fit_trellis(values, HIGH_RATE, 8).quiet[0].tolist() == [True] * 10 + [False] * 10


def entropy_of(symbols: Tensor) -> float:
    shares = torch.bincount(symbols.flatten() - int(symbols.min())).double() / symbols.numel()
    return float(-(shares * shares.clamp_min(1e-12).log2()).sum())


@each_machine
def test_at_equal_error_a_gaussian_takes_fewer_bits(states: int) -> None:
    """Granular gain: at 3 bits 4 states win about 0.8 dB over plain rounding by rate, 8 states 0.9."""
    values = seeded(1, 512, 512)
    points = {}
    for step in (0.3, 0.4):
        codes = fit_lengths(values / step).round_all(values / step)
        points[step] = (entropy_of(codes.long()), float((codes * step - values).square().mean()))
    (fine, low), (coarse, high) = points[0.3], points[0.4]
    step = 0.35 * FINE_STEP
    levels, quantizers = fit_trellis(values / step, HIGH_RATE, states).paths(values / step)
    error = float((levels * step - values).square().mean())
    assert low < error < high  # FINE_STEP is what makes errors equal
    indices = (levels + quantizers * levels.sign()).div(2).long()
    bits = sum(
        entropy_of(indices[quantizers == q]) * float((quantizers == q).double().mean()) for q in (0, 1)
    )
    share = np.log(error / low) / np.log(high / low)
    saved = fine + share * (coarse - fine) - bits
    assert {4: 0.09, 8: 0.11}[states] < saved < 0.2


@each_machine
def test_it_pays_under_feedback_too(states: int) -> None:
    """Fewer bits at equal output error, half a bit being worth a factor of two; groups included."""
    inputs = seeded(2, 400, 24) @ (seeded(24, 24, seed=1) + 2 * torch.eye(24))
    factor = feedback_factor(inputs.transpose(1, 2) @ inputs / 400)
    problem = LayerProblem(seeded(2, 128, 24, seed=2), factor, None)
    step = torch.tensor([0.4])
    codes, error = problem.round(step)
    levels, other = problem.round(step * FINE_STEP, trellis=states)
    assert levels.shape == codes.shape
    whole = levels[0].flatten(0, 1).numpy().astype(np.int64)
    indices, quantizers = (torch.from_numpy(part.astype(np.int64)) for part in indices_of(whole, states, 128))
    shares = [float((quantizers == q).double().mean()) for q in (0, 1)]
    bits = sum(share * entropy_of(indices[quantizers == q]) for q, share in enumerate(shares))
    assert bits + 0.5 * float((other / error).log2()) < entropy_of(codes.long()) - 0.07
    torch.testing.assert_close(other, output_error(problem, levels[0] * step * FINE_STEP), rtol=1e-3, atol=0)


def output_error(problem: LayerProblem, decoded: Tensor) -> Tensor:
    """tr(E H E^T), the closed form that feedback sums up column by column."""
    assert problem.factor is not None
    second = torch.linalg.inv(problem.factor.transpose(1, 2).double() @ problem.factor.double())
    gap = (problem.latent - decoded).double()
    return torch.einsum("gri,gij,grj->", gap, second, gap).float().reshape(1)


def test_steps_do_not_know_of_each_other() -> None:
    problem = LayerProblem(seeded(1, 20, 8), feedback_factor(torch.eye(8)[None]), None)
    steps = torch.tensor([0.2, 0.5])
    both, errors = problem.round(steps, trellis=4)
    for number in (0, 1):
        codes, error = problem.round(steps[number : number + 1], trellis=4)
        assert torch.equal(codes[0], both[number])
        torch.testing.assert_close(error[0], errors[number])


def test_feedback_takes_levels_for_codes() -> None:
    """One column, no feedback: the residue is what the levels leave."""
    values = seeded(1, 30, 1)
    lengths = plain_lengths(30, 1, 8)
    levels, error = round_with_feedback(values, torch.ones(1, 1, 1), torch.tensor([[0.3]]), lengths)
    torch.testing.assert_close(error, (values - 0.3 * levels)[:, :, 0].square())
