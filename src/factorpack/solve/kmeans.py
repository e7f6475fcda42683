"""Weighted k-means by Lloyd's steps from a k-means++ start.

Distances are computed in blocks, never all at once. Random numbers come from a CPU generator, so that they
are the same on every device; a GPU may round sums differently from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SCORES = 1 << 20
"""Distances in one block: about what a cache holds, and enough to share among threads."""
_GPU_SCORES = 1 << 26
_SAMPLE = 1 << 14
"""Points that suffice to choose a start from."""
_TOLERANCE = 1e-4
"""Iteration stops when a step reduces the error by less than this share."""


def row_blocks(total: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of `total` rows of `width` distances, in blocks of bounded size."""
    rows = max(1, (SCORES if device.type == "cpu" else _GPU_SCORES) // width)
    return (slice(start, start + rows) for start in range(0, total, rows))


def nearest(points: Tensor, codewords: Tensor) -> tuple[Tensor, Tensor]:
    """The codeword closest to each point, (n,), and its squared distance, (n,): (n, d) and (k, d)."""
    half = codewords.square().sum(1) / 2
    indices = torch.empty(len(points), dtype=torch.int64, device=points.device)
    errors = points.square().sum(1)
    for block in row_blocks(len(points), len(codewords), points.device):
        # ||x - c||^2 = ||x||^2 + 2 (||c||^2 / 2 - x c)
        indices[block], least = argmin_and_min(torch.addmm(half, points[block], codewords.T, alpha=-1))
        errors[block] += 2 * least
    return indices, errors.clamp_min_(0)


def argmin_and_min(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Argmin and minimum over the last dimension."""
    # On a CPU, numpy's argmin is several times faster than torch's.
    on_cpu = scores.device.type == "cpu"
    indices = torch.from_numpy(scores.numpy().argmin(-1)) if on_cpu else scores.argmin(-1)
    return indices, scores.gather(-1, indices[..., None])[..., 0]


def sums_by_index(
    points: Tensor, indices: Tensor, count: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted sums of the points with the same index, (k, d), and their total weights, (k,), in float64."""
    size = points.shape[1]
    places = torch.arange(size, device=points.device)
    sums = torch.zeros(count * size, dtype=torch.float64, device=points.device)
    for block in row_blocks(len(points), size, points.device):
        values = points[block].double()
        if weights is not None:
            values = values * weights[block, None]
        flat = (indices[block, None] * size + places).reshape(-1)
        sums += torch.bincount(flat, values.reshape(-1), minlength=count * size)
    heavy = None if weights is None else weights.double()
    return sums.reshape(count, size), torch.bincount(indices, heavy, minlength=count).double()


def kmeans_plus_plus(
    points: Tensor, count: int, generator: torch.Generator, weights: Tensor | None = None
) -> Tensor:
    """Initial codewords, (k, d), each drawn with probability proportional to weight times squared distance.

    This is the k-means++ start, on a sample of the points if there are many. Draws are batched: an eighth as
    many as there are codewords already, and at least one.
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


def lloyd_step(
    points: Tensor, codewords: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One Lloyd step: the means of the points closest to each codeword, and their total weights, (k,).

    The third result is the error before the step. Codewords without points are moved, see `reseed_unused`.
    """
    indices, errors = nearest(points, codewords)
    if weights is not None:
        errors = errors * weights
    sums, shares = sums_by_index(points, indices, len(codewords), weights)
    means = (sums / shares.clamp_min(torch.finfo(torch.float64).tiny)[:, None]).to(points)
    moved = torch.where(shares[:, None] > 0, means, codewords)
    return reseed_unused(moved, shares, points, errors), shares, errors.sum(dtype=torch.float64)


def reseed_unused(codewords: Tensor, shares: Tensor, points: Tensor, errors: Tensor) -> Tensor:
    """Moves unused codewords to the points with the largest errors, (n,), which cannot increase the error."""
    empty = (shares <= 0).nonzero()[:, 0][: len(points)]
    if not len(empty):
        return codewords
    return codewords.index_copy(0, empty, points[errors.topk(len(empty)).indices])


def kmeans(points: Tensor, start: Tensor, iterations: int, weights: Tensor | None = None) -> Tensor:
    """Codewords, (k, d), after `iterations` Lloyd steps, or fewer if they converge."""
    codewords, before = start, float("inf")
    for _ in range(iterations):
        codewords, _, error = lloyd_step(points, codewords, weights)
        if has_converged(before, error.item()):
            break
        before = error.item()
    return codewords


def has_converged(before: float, error: float) -> bool:
    """Whether the last step reduced the error too little to go on."""
    return not error < before * (1 - _TOLERANCE)


def annealed_kmeans(
    points: Tensor,
    start: Tensor,
    iterations: int,
    generator: torch.Generator,
    heat: float = 1.0,
    decay: float = 0.5,
) -> Tensor:
    """Lloyd steps on noisy points, with noise that decays over the iterations (stochastic relaxation).

    The noise has the points' own covariance times T_i^2, T_i = heat (1 - i/I)^decay. A mean over m points has
    noise of 1/m that covariance, so only the noise of the means is drawn.
    """
    centred = (points - points.mean(0)).double()
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(points))
    root = vectors * values.clamp_min(0).sqrt()  # root root^T is the covariance
    codewords = start
    for step in range(iterations):
        codewords, shares, _ = lloyd_step(points, codewords)
        noise = torch.randn(codewords.shape, generator=generator, dtype=torch.float64).to(root.device)
        shift = noise @ root.T / shares.clamp_min(1)[:, None].sqrt()
        codewords = codewords + heat * (1 - step / iterations) ** decay * shift.to(codewords)
    return codewords
