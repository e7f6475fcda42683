"""Additive quantization: points as sums of codewords, one from each codebook.

It alternates between codebooks by least squares for fixed codes, and codes for fixed codebooks: one stage at
a time (iterated conditional modes), or two stages at a time by beam search. No step increases the error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from factorpack.solve.kmeans import (
    kmeans,
    kmeans_plus_plus,
    nearest,
    reseed_unused,
    row_blocks,
    sums_by_index,
)

CANDIDATES = 4
"""Codewords of one stage that are tried with all of another."""
_RIDGE = 1e-3
"""As a share of one point: fixes unused codewords, and offsets that codebooks could exchange."""


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveCode:
    """Points, and the codewords whose sums approximate them."""

    points: Tensor
    """(n, d)."""
    codebooks: Tensor
    """(stages, k, d)."""
    indices: Tensor
    """The codeword of each point in each codebook: (stages, n)."""

    def residual(self) -> Tensor:
        """Points minus their sums of codewords: (n, d)."""
        residual = self.points.clone()
        for codebook, index in zip(self.codebooks, self.indices, strict=True):
            residual -= codebook[index]
        return residual

    def error(self) -> Tensor:
        return self.residual().square().sum(dtype=torch.float64)


def additive_quantize(
    points: Tensor, stages: int, count: int, iterations: int, generator: torch.Generator
) -> AdditiveCode:
    """Alternates codebooks and codes for some iterations, from a residual k-means start of as many steps."""
    sums = residual_kmeans(points, stages, count, iterations, generator)
    for _ in range(iterations if stages > 1 else 0):
        sums = move_unused_codewords(update_codebooks(sums))
        sums = update_pairs(update_codes(sums), generator)
    return sums


def residual_kmeans(
    points: Tensor, stages: int, count: int, iterations: int, generator: torch.Generator
) -> AdditiveCode:
    """k-means, then k-means of its residuals, and so on."""
    left, codebooks, indices = points, [], []
    for _ in range(stages):
        codebook = kmeans(left, kmeans_plus_plus(left, count, generator), iterations)
        index, _ = nearest(left, codebook)
        left = left - codebook[index]
        codebooks.append(codebook)
        indices.append(index)
    return AdditiveCode(points, torch.stack(codebooks), torch.stack(indices))


def update_codes(sums: AdditiveCode) -> AdditiveCode:
    """The best codeword of each point, stage by stage, with the other stages fixed."""
    left, indices = sums.residual(), sums.indices.clone()
    for codebook, index in zip(sums.codebooks, indices, strict=True):
        left += codebook[index]
        index.copy_(nearest(left, codebook)[0])
        left -= codebook[index]
    return replace(sums, indices=indices)


def update_pairs(sums: AdditiveCode, generator: torch.Generator) -> AdditiveCode:
    """Updates the codes of two random stages together, where that reduces the error.

    A beam search: the codewords of one stage closest to the pair's target, each with the best codeword of
    the other stage for the remainder.
    """
    first, second = torch.randperm(len(sums.codebooks), generator=generator)[:2].tolist()
    one, other = sums.codebooks[first], sums.codebooks[second]
    left = sums.residual()
    both = left + one[sums.indices[first]] + other[sums.indices[second]]
    indices, errors = sums.indices.clone(), left.square().sum(1)
    for candidate in closest_codewords(both, one, min(CANDIDATES, len(one))).unbind(1):
        partner, tried = nearest(both - one[candidate], other)
        better = tried < errors
        indices[first] = torch.where(better, candidate, indices[first])
        indices[second] = torch.where(better, partner, indices[second])
        errors = torch.where(better, tried, errors)
    return replace(sums, indices=indices)


def closest_codewords(points: Tensor, codewords: Tensor, number: int) -> Tensor:
    """The `number` codewords, (k, d), closest to each point, (n, d): (n, number)."""
    half = codewords.square().sum(1) / 2
    scores = (
        torch.addmm(half, points[block], codewords.T, alpha=-1)
        for block in row_blocks(len(points), len(codewords), points.device)
    )
    return torch.cat([each.topk(number, largest=False).indices for each in scores])


def update_codebooks(sums: AdditiveCode) -> AdditiveCode:
    """All codebooks at once, by least squares: (B^T B + r I) D = B^T residual, and C + D are the new ones.

    B (n, stages k) has a one where a point uses a codeword. The error cannot rise: D = 0 would leave it
    unchanged, and the ridge only penalises D.
    """
    stages, count, _ = sums.codebooks.shape
    left = sums.residual()
    right = torch.empty_like(sums.codebooks, dtype=torch.float64)
    together = right.new_empty(stages, count, stages, count)
    for stage, index in enumerate(sums.indices):
        right[stage], _ = sums_by_index(left, index, count)
        for other, beside in enumerate(sums.indices):
            pairs = torch.bincount(index * count + beside, minlength=count * count)
            together[stage, :, other] = pairs.reshape(count, count)
    square = together.reshape(stages * count, stages * count)
    square.diagonal().add_(_RIDGE)
    change = torch.cholesky_solve(right.flatten(0, 1), torch.linalg.cholesky(square))
    return replace(sums, codebooks=sums.codebooks + change.reshape(right.shape).to(sums.codebooks))


def move_unused_codewords(sums: AdditiveCode) -> AdditiveCode:
    """Moves unused codewords to where errors are largest, with the other stages fixed."""
    codebooks, left = [], sums.residual()
    for codebook, index in zip(sums.codebooks, sums.indices, strict=True):
        shares = torch.bincount(index, minlength=len(codebook))
        codebooks.append(reseed_unused(codebook, shares, left + codebook[index], left.square().sum(1)))
    return replace(sums, codebooks=torch.stack(codebooks))
