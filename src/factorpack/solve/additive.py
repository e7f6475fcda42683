"""Additive quantization: points as sums of codewords, one of each codebook.

By turns: codebooks by least squares for the codes there are, and codes one stage at a time for the codebooks
there are, which is iterated conditional modes, or two stages at a time by beam search. No step makes the error
larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from factorpack.solve.kmeans import kmeans, nearest, pieces, reseeded, spread, totals

CANDIDATES = 4
"""Codewords of one stage that are tried with all of another."""
_RIDGE = 1e-3
"""Of one point: holds codewords nobody uses, and what codebooks could share in more than one way."""


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Points, and the codewords whose sums stand for them."""

    points: Tensor
    """(n, d)."""
    codebooks: Tensor
    """(stages, k, d)."""
    indices: Tensor
    """The codeword a point has of each codebook: (stages, n)."""

    def left(self) -> Tensor:
        """What the sums leave of the points: (n, d)."""
        left = self.points.clone()
        for codebook, index in zip(self.codebooks, self.indices, strict=True):
            left -= codebook[index]
        return left

    def error(self) -> Tensor:
        return self.left().square().sum(dtype=torch.float64)


def additive(points: Tensor, stages: int, count: int, iterations: int, generator: torch.Generator) -> Sums:
    """So many rounds of codebooks and codes, from a start of as many steps of residual k-means."""
    sums = residual_start(points, stages, count, iterations, generator)
    for _ in range(iterations if stages > 1 else 0):
        sums = with_used_codewords(with_best_codebooks(sums))
        sums = with_best_pairs(with_best_codes(sums), generator)
    return sums


def residual_start(
    points: Tensor, stages: int, count: int, iterations: int, generator: torch.Generator
) -> Sums:
    """k-means, then k-means of what that leaves, and so on."""
    left, codebooks, indices = points, [], []
    for _ in range(stages):
        codebook = kmeans(left, spread(left, count, generator), iterations)
        index, _ = nearest(left, codebook)
        left = left - codebook[index]
        codebooks.append(codebook)
        indices.append(index)
    return Sums(points, torch.stack(codebooks), torch.stack(indices))


def with_best_codes(sums: Sums) -> Sums:
    """Stage after stage, each point's best codeword while the other stages keep theirs."""
    left, indices = sums.left(), sums.indices.clone()
    for codebook, index in zip(sums.codebooks, indices, strict=True):
        left += codebook[index]
        index.copy_(nearest(left, codebook)[0])
        left -= codebook[index]
    return replace(sums, indices=indices)


def with_best_pairs(sums: Sums, generator: torch.Generator) -> Sums:
    """Two stages, drawn at random, chosen anew together where that is better.

    A beam search: of one stage the few codewords closest to what both should make, each with the best of
    the other stage that goes with it.
    """
    first, second = torch.randperm(len(sums.codebooks), generator=generator)[:2].tolist()
    one, other = sums.codebooks[first], sums.codebooks[second]
    left = sums.left()
    both = left + one[sums.indices[first]] + other[sums.indices[second]]
    indices, errors = sums.indices.clone(), left.square().sum(1)
    for candidate in closest(both, one, min(CANDIDATES, len(one))).unbind(1):
        partner, tried = nearest(both - one[candidate], other)
        better = tried < errors
        indices[first] = torch.where(better, candidate, indices[first])
        indices[second] = torch.where(better, partner, indices[second])
        errors = torch.where(better, tried, errors)
    return replace(sums, indices=indices)


def closest(points: Tensor, codewords: Tensor, number: int) -> Tensor:
    """The few codewords, (k, d), closest to each point, (n, d): (n, number)."""
    half = codewords.square().sum(1) / 2
    scores = (
        torch.addmm(half, points[piece], codewords.T, alpha=-1)
        for piece in pieces(len(points), len(codewords), points.device)
    )
    return torch.cat([each.topk(number, largest=False).indices for each in scores])


def with_best_codebooks(sums: Sums) -> Sums:
    """All codebooks at once, by least squares: (B^T B + r I) D = B^T left, and C + D are the new ones.

    B (n, stages k) has ones where a point has a codeword. The error cannot rise: D = 0 would leave it as it
    is, and the ridge only speaks against D.
    """
    stages, count, _ = sums.codebooks.shape
    left = sums.left()
    right = torch.empty_like(sums.codebooks, dtype=torch.float64)
    together = right.new_empty(stages, count, stages, count)
    for stage, index in enumerate(sums.indices):
        right[stage], _ = totals(left, index, count)
        for other, beside in enumerate(sums.indices):
            pairs = torch.bincount(index * count + beside, minlength=count * count)
            together[stage, :, other] = pairs.reshape(count, count)
    square = together.reshape(stages * count, stages * count)
    square.diagonal().add_(_RIDGE)
    change = torch.cholesky_solve(right.flatten(0, 1), torch.linalg.cholesky(square))
    return replace(sums, codebooks=sums.codebooks + change.reshape(right.shape).to(sums.codebooks))


def with_used_codewords(sums: Sums) -> Sums:
    """Codewords nobody uses put where, with the other stages as they are, errors are largest."""
    codebooks, left = [], sums.left()
    for codebook, index in zip(sums.codebooks, sums.indices, strict=True):
        shares = torch.bincount(index, minlength=len(codebook))
        codebooks.append(reseeded(codebook, shares, left + codebook[index], left.square().sum(1)))
    return replace(sums, codebooks=torch.stack(codebooks))
