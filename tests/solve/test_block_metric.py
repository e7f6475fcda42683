"""Codewords in the metric of a layer's inputs, against a float64 reference written out number by number."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from factorpack.record import LayerMoments
from factorpack.solve import kmeans as kmeans_module
from factorpack.solve.block_metric import BlockProblem, block_problem, restore_order
from factorpack.solve.kmeans import lloyd_step, nearest
from factorpack.solve.moments import MomentAccumulator
from tests.helpers import assert_close, assert_same_tensor, seeded

WIDE = torch.float64


def moments_of(inputs: Tensor) -> LayerMoments:
    """Moments of inputs (groups, positions, K)."""
    mean = inputs.mean(1)
    return LayerMoments(inputs.transpose(1, 2) @ inputs / inputs.shape[1], mean, None, mean)


def problem(blocks: int = 5, rows: int = 40, size: int = 3) -> BlockProblem:
    roots = seeded(blocks, size, size, dtype=WIDE, seed=1)
    return BlockProblem(seeded(blocks, rows, size, dtype=WIDE), roots @ roots.transpose(1, 2))


def costs(posed: BlockProblem, codewords: Tensor) -> Tensor:
    """(v - c)^T H (v - c): (blocks, rows, k)."""
    error = posed.points[:, :, None] - codewords
    return torch.einsum("brki,bij,brkj->brk", error, posed.metric, error)


@pytest.mark.parametrize("scores", [1, 50, 1000, 1 << 20])
def test_nearest_costs_least(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few costs are held at once."""
    monkeypatch.setattr(kmeans_module, "SCORES", scores)
    posed, codewords = problem(), seeded(7, 3, dtype=WIDE, seed=2)
    indices, found = posed.nearest(codewords)
    expected = costs(posed, codewords).min(2)
    assert torch.equal(indices, expected.indices)
    assert_close(found, expected.values)


def test_a_step_solves_the_normal_equations() -> None:
    posed, start = problem(), seeded(4, 3, dtype=WIDE, seed=2)
    indices, found = posed.nearest(start)
    moved, before = posed.lloyd_step(start)
    assert_close(before, found.sum())
    for index in range(4):
        block, row = (indices == index).nonzero().unbind(1)
        metric, points = posed.metric[block], posed.points[block, row]
        slope = torch.einsum("jab,jb->a", metric, moved[index] - points)
        assert slope.abs().max() < 1e-9 * torch.einsum("jab,jb->a", metric.abs(), points.abs()).max()


def test_the_cost_never_rises() -> None:
    posed = problem(rows=100)
    codewords, found = posed.points[:, :3].flatten(0, 1), []
    for _ in range(15):
        codewords, cost = posed.lloyd_step(codewords)
        found.append(cost.item())
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(found))
    assert found[-1] < 0.9 * found[0]


def test_codewords_nobody_wants_start_again() -> None:
    posed = problem()
    start = torch.cat([posed.points[0, :1], torch.full((2, 3), 1e6, dtype=WIDE)])
    moved, _ = posed.lloyd_step(start)
    _, found = posed.nearest(start)
    worst = posed.points.flatten(0, 1)[found.reshape(-1).topk(2).indices]
    assert_same_tensor(moved[1:], worst)


def test_in_the_metric_of_white_inputs_it_is_k_means() -> None:
    points, start = seeded(60, 4, dtype=WIDE), seeded(6, 4, dtype=WIDE, seed=1)
    posed = BlockProblem(points.reshape(3, 20, 4), torch.eye(4, dtype=WIDE).expand(3, 4, 4))
    assert torch.equal(posed.nearest(start)[0].reshape(-1), nearest(points, start)[0])
    assert_close(posed.lloyd_step(start)[0], lloyd_step(points, start)[0])


@pytest.mark.parametrize("groups", [1, 2])
def test_the_cost_is_the_output_s_where_blocks_do_not_correlate(groups: int) -> None:
    """sum ||W u - W^ u||^2 over positions, for inputs that are zero in all blocks but one."""
    outputs, blocks, size, positions = 6, 4, 3, 30
    inputs = torch.zeros(groups, positions * blocks, blocks, size, dtype=WIDE)
    for block in range(blocks):
        inputs[:, block::blocks, block] = seeded(groups, positions, size, dtype=WIDE, seed=block)
    inputs = inputs.flatten(2)
    weight = seeded(groups * outputs, blocks * size, dtype=WIDE, seed=9)
    moments = moments_of(inputs)
    posed = block_problem(weight.reshape(-1, size), moments, shared=False, damping=1e-12)
    codewords = seeded(5, size, dtype=WIDE, seed=3)
    indices, found = posed.nearest(codewords)
    error = (weight - codewords[restore_order(indices, groups)].reshape(weight.shape)).reshape(
        groups, outputs, -1
    )
    expected = (inputs @ error.transpose(1, 2)).square().sum() / inputs.shape[1]
    level = moments.second.diagonal(dim1=1, dim2=2).mean()
    assert_close(found.sum() * level, expected, torch.float32)  # the damping is not quite nothing


def test_shared_is_the_mean_of_all_blocks() -> None:
    moments = moments_of(seeded(2, 50, 12, dtype=WIDE))
    points = seeded(2 * 5 * 4, 3, dtype=WIDE, seed=1)
    own = block_problem(points, moments, shared=False, damping=0.1)
    shared = block_problem(points, moments, shared=True, damping=0.1)
    assert_same_tensor(shared.points, own.points)
    assert_close(shared.metric, own.metric.mean(0).expand_as(own.metric))


def test_the_order_of_tiles_comes_back() -> None:
    points = torch.arange(2 * 5 * 4 * 3.0).reshape(-1, 3)
    posed = block_problem(points, moments_of(seeded(2, 50, 12)), shared=False, damping=0.1)
    assert posed.points.shape == (2 * 4, 5, 3)
    assert torch.equal(restore_order(posed.points[:, :, 0], 2), points[:, 0])


def test_blocks_are_those_of_a_convolution_s_kernels() -> None:
    """The moments of a plain convolution, unfold_inputs: block i is the kernel of input channel i."""
    layer = nn.Conv2d(4, 6, 3, bias=False).double()
    inputs = seeded(8, 4, 7, 7, dtype=WIDE)
    inputs[:, 2] = 0.0
    running = MomentAccumulator(layer, 10**6)
    running.add(inputs)
    points = layer.weight.detach().reshape(-1, 9)
    posed = block_problem(points, running.result(), shared=False, damping=0.5)
    assert_close(posed.metric[2], 0.5 * torch.eye(9, dtype=WIDE))
    assert posed.metric[[0, 1, 3]].diagonal(dim1=1, dim2=2).min() > 1


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_the_unit_of_the_inputs_does_not_matter(unit: float) -> None:
    inputs, points = seeded(1, 50, 6), seeded(20, 3, seed=1)
    usual = block_problem(points, moments_of(inputs), shared=False, damping=0.1)
    there = block_problem(points, moments_of(unit * inputs.double()), shared=False, damping=0.1)
    assert_close(there.metric, usual.metric, torch.float32)


def test_inputs_that_are_never_there() -> None:
    posed = block_problem(seeded(20, 3), moments_of(torch.zeros(1, 5, 6)), shared=False, damping=0.1)
    codewords = posed.solve(seeded(4, 3, seed=1), 5)
    assert codewords.isfinite().all()
