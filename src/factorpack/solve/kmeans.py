"""Weighted k-means: codewords that many points can share, by Lloyd's steps from a spread-out start.

Nothing here holds the distances of all points at once. Random numbers come from a generator of the CPU, so
that they are the same on every device; a GPU may round sums differently from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCORES = 1 << 20
"""Numbers in the largest array of distances: about what a cache holds, and enough to share among threads."""
_ON_A_GPU = 1 << 26
_SAMPLE = 1 << 14
"""Points that are enough to choose a start from."""
_TOLERANCE = 1e-4
"""A step that gains less than this share of the error is the last."""


def pieces(total: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of `total` rows of `width` distances, each small enough to be worked on at once."""
    rows = max(1, (SCORES if device.type == "cpu" else _ON_A_GPU) // width)
    return (slice(start, start + rows) for start in range(0, total, rows))


def nearest(points: Tensor, codewords: Tensor) -> tuple[Tensor, Tensor]:
    """The codeword closest to each point, (n,), and its squared distance, (n,): (n, d) and (k, d)."""
    half = codewords.square().sum(1) / 2
    indices = torch.empty(len(points), dtype=torch.int64, device=points.device)
    errors = points.square().sum(1)
    for piece in pieces(len(points), len(codewords), points.device):
        # ||x - c||^2 = ||x||^2 + 2 (||c||^2 / 2 - x c)
        indices[piece], least = lowest(torch.addmm(half, points[piece], codewords.T, alpha=-1))
        errors[piece] += 2 * least
    return indices, errors.clamp_min_(0)


def lowest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Where the last dimension is lowest, and how low."""
    # On a CPU numpy finds it several times faster than torch.
    on_cpu = scores.device.type == "cpu"
    indices = torch.from_numpy(scores.numpy().argmin(-1)) if on_cpu else scores.argmin(-1)
    return indices, scores.gather(-1, indices[..., None])[..., 0]


def totals(
    points: Tensor, indices: Tensor, count: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted sums of the points that share an index, (k, d), and their weights, (k,), in float64."""
    size = points.shape[1]
    places = torch.arange(size, device=points.device)
    sums = torch.zeros(count * size, dtype=torch.float64, device=points.device)
    for piece in pieces(len(points), size, points.device):
        values = points[piece].double()
        if weights is not None:
            values = values * weights[piece, None]
        flat = (indices[piece, None] * size + places).reshape(-1)
        sums += torch.bincount(flat, values.reshape(-1), minlength=count * size)
    heavy = None if weights is None else weights.double()
    return sums.reshape(count, size), torch.bincount(indices, heavy, minlength=count).double()


def spread(points: Tensor, count: int, generator: torch.Generator, weights: Tensor | None = None) -> Tensor:
    """Points to start from, (k, d), each drawn by its weight times its squared distance from those before.

    This is the start of k-means++, on a sample of the points where there are many; an eighth as many as there
    are, but at least one, is drawn at a time.
    """
    picked = torch.randperm(len(points), generator=generator)[: max(_SAMPLE, 8 * count)].to(points.device)
    some = points[picked]
    heavy = torch.ones_like(some[:, 0]) if weights is None else weights[picked].to(some)
    throws = torch.rand(count, generator=generator, dtype=torch.float64).to(points.device)
    chosen, done = points.new_empty(count, points.shape[1]), 0
    far = torch.full_like(heavy, torch.inf)
    while done < count:
        ladder = (far if done else heavy).cumsum(0, dtype=torch.float64)
        now = slice(done, min(done + max(done // 8, 1), count))
        places = torch.searchsorted(ladder, throws[now] * ladder[-1], right=True)
        chosen[now] = some[places.clamp_max(len(some) - 1)]
        far = torch.minimum(far, nearest(some, chosen[now])[1] * heavy)
        done = now.stop
    return chosen


def improved(
    points: Tensor, codewords: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One of Lloyd's steps: codewords as means of the points they are closest to, their weights, (k,).

    The third result is the error before the step. Codewords without points start again, see `reseeded`.
    """
    indices, errors = nearest(points, codewords)
    if weights is not None:
        errors = errors * weights
    sums, shares = totals(points, indices, len(codewords), weights)
    means = (sums / shares.clamp_min(torch.finfo(torch.float64).tiny)[:, None]).to(points)
    moved = torch.where(shares[:, None] > 0, means, codewords)
    return reseeded(moved, shares, points, errors), shares, errors.sum(dtype=torch.float64)


def reseeded(codewords: Tensor, shares: Tensor, points: Tensor, errors: Tensor) -> Tensor:
    """Codewords without a share put where the errors, (n,), are largest: nothing gets worse by it."""
    empty = (shares <= 0).nonzero()[:, 0][: len(points)]
    if not len(empty):
        return codewords
    return codewords.index_copy(0, empty, points[errors.topk(len(empty)).indices])


def kmeans(points: Tensor, start: Tensor, iterations: int, weights: Tensor | None = None) -> Tensor:
    """Codewords, (k, d), after some of Lloyd's steps, or fewer where they gain nothing more."""
    codewords, before = start, float("inf")
    for _ in range(iterations):
        codewords, _, error = improved(points, codewords, weights)
        if gains_nothing(before, error.item()):
            break
        before = error.item()
    return codewords


def gains_nothing(before: float, error: float) -> bool:
    """Whether an error is so little below the one before it that the next step is not worth its time."""
    return not error < before * (1 - _TOLERANCE)


def annealed_kmeans(
    points: Tensor,
    start: Tensor,
    iterations: int,
    generator: torch.Generator,
    heat: float = 1.0,
    decay: float = 0.5,
) -> Tensor:
    """Lloyd's steps by which each codeword is the mean of noisy points, less noisy from step to step.

    The noise has the points' own covariance times T_i^2, T_i = heat (1 - i/I)^decay: stochastic relaxation
    of the codebook. The mean of m such noises is one of 1/m the covariance, and only that is drawn.
    """
    centred = (points - points.mean(0)).double()
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(points))
    root = vectors * values.clamp_min(0).sqrt()  # root root^T is the covariance
    codewords = start
    for step in range(iterations):
        codewords, shares, _ = improved(points, codewords)
        noise = torch.randn(codewords.shape, generator=generator, dtype=torch.float64).to(root.device)
        shaken = noise @ root.T / shares.clamp_min(1)[:, None].sqrt()
        codewords = codewords + heat * (1 - step / iterations) ** decay * shaken.to(codewords)
    return codewords
