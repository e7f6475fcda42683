"""Codewords that preserve a layer's output: k-means in which every block of inputs has its own metric.

A tile v of a filter multiplies d inputs u, and an error e in it adds e^T H e to the output error, H = E[u u^T]
of those inputs, if blocks of inputs are assumed uncorrelated. Tiles at the same position of all filters share H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from factorpack.record import LayerMoments
from factorpack.solve.kmeans import argmin_and_min, has_converged, reseed_unused, row_blocks, sums_by_index


@dataclass(frozen=True, slots=True, eq=False)
class BlockProblem:
    """Tiles grouped by the block of inputs they multiply, and the metric of each block."""

    points: Tensor
    """(blocks, rows, d)."""
    metric: Tensor
    """H of each block, symmetric and positive definite: (blocks, d, d)."""

    def nearest(self, codewords: Tensor) -> tuple[Tensor, Tensor]:
        """The cheapest codeword for each tile, (blocks, rows), and its cost, (blocks, rows).

        (v - c)^T H (v - c) = v^T H v + 2 (c^T H c / 2 - (H v)^T c).
        """
        pulled = self.points @ self.metric
        indices = torch.empty(pulled.shape[:2], dtype=torch.int64, device=pulled.device)
        costs = (pulled * self.points).sum(2)
        blocks, rows, _ = pulled.shape
        for some in row_blocks(blocks, rows * len(codewords), pulled.device):
            half = ((codewords @ self.metric[some]) * codewords).sum(2) / 2  # (b, k)
            columns = codewords.T.expand(len(half), -1, -1)
            for part in row_blocks(rows, len(codewords), pulled.device):
                scores = torch.baddbmm(half[:, None], pulled[some, part], columns, alpha=-1)
                indices[some, part], least = argmin_and_min(scores)
                costs[some, part] += 2 * least
        return indices, costs.clamp_min_(0)

    def lloyd_step(self, codewords: Tensor) -> tuple[Tensor, Tensor]:
        """One step: c = (sum H)^-1 sum H v over the tiles assigned to c; also returns the cost before it."""
        indices, costs = self.nearest(codewords)
        blocks, size, count = len(self.metric), self.metric.shape[1], len(codewords)
        flat, of_block = indices.reshape(-1), torch.arange(blocks, device=indices.device)[:, None]
        often = torch.bincount((indices + count * of_block).reshape(-1), minlength=blocks * count)
        often = often.reshape(blocks, count).double()
        left = (often.T @ self.metric.double().reshape(blocks, -1)).reshape(count, size, size)
        right, _ = sums_by_index((self.points @ self.metric).flatten(0, 1), flat, count)
        used = often.sum(0) > 0
        moved = codewords.clone()
        moved[used] = torch.linalg.solve(left[used], right[used]).to(codewords)
        points = self.points.flatten(0, 1)
        return reseed_unused(moved, used, points, costs.reshape(-1)), costs.sum(dtype=torch.float64)

    def solve(self, start: Tensor, iterations: int) -> Tensor:
        """Codewords, (k, d), after `iterations` steps, or fewer if they converge."""
        codewords, before = start, float("inf")
        for _ in range(iterations):
            codewords, cost = self.lloyd_step(codewords)
            if has_converged(before, cost.item()):
                break
            before = cost.item()
        return codewords


def block_problem(points: Tensor, moments: LayerMoments, shared: bool, damping: float) -> BlockProblem:
    """The problem for all tiles, (n, d), of a weight, in their order in the weight; tiles divide the filters.

    With `shared` all blocks use the mean metric. `damping` times the mean square of an input is added to
    every diagonal, so that inputs rarely active in the sample are not ignored.
    """
    size = points.shape[1]
    groups, filter_size, _ = moments.second.shape
    count = filter_size // size
    second = moments.second.to(points).reshape(groups, count, size, count, size)
    metric = second.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)
    level = metric.diagonal(dim1=1, dim2=2).mean()
    level = torch.where(level > 0, level, 1.0)  # inputs that are always zero: all errors cost the same
    if shared:
        metric = metric.mean(0).expand_as(metric)
    # In units of the level: no squared input overflows, and costs do not depend on the inputs' scale.
    metric = metric / level + damping * torch.eye(size, dtype=points.dtype, device=points.device)
    tiles = points.reshape(groups, -1, count, size).transpose(1, 2)  # (groups, blocks, rows, d)
    return BlockProblem(tiles.flatten(0, 1).contiguous(), metric)


def restore_order(indices: Tensor, groups: int) -> Tensor:
    """Indices of a problem's tiles, (blocks, rows), in the order of the tiles in the weight: (n,)."""
    return indices.reshape(groups, -1, indices.shape[1]).transpose(1, 2).reshape(-1)
