"""Searches for the order of channels that minimises the determinant of the tiles' covariance.

For a given number of codewords, the best error of a codebook for a Gaussian is proportional to det(cov)^(1/d):
the more correlated the elements of a tile, and the more unequal their variances, the less there is to code.
Buckets are the channels that share a tile; their position in it decides which variances add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import lcm

import torch
from torch import Tensor

from factorpack.errors import WeightError

CANDIDATES = 256
"""Swaps tried per iteration."""
PATIENCE = 50
"""Iterations without a gain after which the search stops."""


@dataclass(frozen=True, slots=True)
class Child:
    """A weight whose input channels are permuted, as the sums from which any order's tile covariance follows."""

    channels: int  # in one tile
    rows: int  # output channels
    second: Tensor  # (n, n, u, u), sum over rows of the products of two channels' elements
    first: Tensor  # (n, u), sum over rows
    floor: float  # added to the variances, so that zero channels have a finite logarithm

    @classmethod
    def of(cls, weight: Tensor, channels: int, floor: float = 1e-6) -> Child:
        """For a weight of (rows, n, u): n channels of u elements each, in tiles of `channels` channels."""
        rows, count, unit = weight.shape
        flat = weight.detach().double().flatten(1)
        if not bool(flat.isfinite().all()):
            raise WeightError("a weight has NaN or infinity, so its channels cannot be ordered")
        gram = (flat.T @ flat).reshape(count, unit, count, unit).transpose(1, 2).contiguous()
        power = float(flat.square().mean()) or 1.0
        return cls(channels, rows, gram, flat.sum(0).reshape(count, unit), floor * power)

    @property
    def tile(self) -> int:
        return self.channels * self.first.shape[1]

    @property
    def tiles(self) -> int:
        return self.rows * len(self.first) // self.channels

    def sums(self, order: Tensor) -> Tensor:
        """Moments summed over all tiles, second ones above the first in the last row: (d + 1, d)."""
        return self._moments(order.reshape(-1, self.channels)).sum(0)

    def changes(self, order: Tensor, swaps: Tensor) -> Tensor:
        """How each of k swaps of two positions, (k, 2), changes `sums`: (k, d + 1, d)."""
        buckets = swaps // self.channels
        places = buckets[..., None] * self.channels + torch.arange(self.channels, device=order.device)
        old = order[places]  # (k, 2, channels)
        one, other = swaps[:, :1, None], swaps[:, 1:, None]
        new = torch.where(places == one, order[other], torch.where(places == other, order[one], old))
        change = self._moments(new) - self._moments(old)
        apart = (buckets[:, 0] != buckets[:, 1]).to(change)
        return change[:, 0] + apart[:, None, None] * change[:, 1]

    def log_det(self, sums: Tensor) -> Tensor:
        """Number of tiles times the log determinant of their covariance, for each element of `sums`."""
        mean = sums[..., -1, :] / self.tiles
        covariance = sums[..., :-1, :] / self.tiles - mean[..., :, None] * mean[..., None, :]
        ridge = self.floor * torch.eye(self.tile, dtype=sums.dtype, device=sums.device)
        logarithm: Tensor = torch.linalg.slogdet(covariance + ridge).logabsdet
        return self.tiles * logarithm

    def _moments(self, buckets: Tensor) -> Tensor:
        """Sums over the rows for each bucket of channels: (..., channels) -> (..., d + 1, d)."""
        blocks = self.second[buckets[..., :, None], buckets[..., None, :]]  # (..., c, c, u, u)
        square = blocks.transpose(-3, -2).reshape(*buckets.shape[:-1], self.tile, self.tile)
        mean = self.first[buckets].reshape(*buckets.shape[:-1], 1, self.tile)
        return torch.cat([square, mean], -2)


@dataclass(frozen=True, slots=True)
class Order:
    """The best order found, with log det per element in nats: before, after, and after each step."""

    order: Tensor
    before: float
    after: float
    history: tuple[float, ...]


def search_order(children: list[Child], iterations: int, generator: torch.Generator) -> Order:
    """Starts from the given order or from the order by variance, whichever is better; then swaps pairs.

    Each iteration draws random pairs, keeps the swaps that help on their own, best first and at most one per
    bucket, and makes the leading ones that help most together. The objective therefore never rises.
    """
    elements = sum(child.tiles * child.tile for child in children)
    unchanged = torch.arange(len(children[0].first), device=children[0].first.device)
    starts = [unchanged, _by_variance(children)]
    objectives = [_objective(children, [child.sums(start) for child in children]).item() for start in starts]
    order = starts[objectives[1] < objectives[0]].clone()
    sums = [child.sums(order) for child in children]
    history = [min(objectives)]
    idle = 0
    for _ in range(iterations):
        swaps = torch.randint(len(order), (CANDIDATES, 2), generator=generator).to(order.device)
        changes = [child.changes(order, swaps) for child in children]
        found = _objective(children, [a + b for a, b in zip(sums, changes, strict=True)])
        chosen = _disjoint(swaps, found, history[-1], reduce(lcm, (child.channels for child in children)))
        idle = 0 if chosen else idle + 1
        if idle == PATIENCE:
            break
        if chosen:
            together = [each[chosen].cumsum(0) for each in changes]
            objective = _objective(children, [a + b for a, b in zip(sums, together, strict=True)])
            last = int(objective.argmin())
            sums = [a + b[last] for a, b in zip(sums, together, strict=True)]
            made = swaps[chosen[: last + 1]]
            order[made] = order[made.flip(1)]
            history.append(objective[last].item())
    after = _objective(children, [child.sums(order) for child in children]).item()
    return Order(
        order, objectives[0] / elements, after / elements, tuple(each / elements for each in history)
    )


def _objective(children: list[Child], sums: list[Tensor]) -> Tensor:
    return torch.stack([child.log_det(each) for child, each in zip(children, sums, strict=True)]).sum(0)


def _by_variance(children: list[Child]) -> Tensor:
    """Channels with the most energy at the first position of the tiles, the next ones at the second, and so on.

    The sum of the variances over a tile's positions is fixed; their product, which bounds the determinant, is
    least where they are most unequal.
    """
    energy = sum(
        child.tiles * child.tile * each / each.sum().clamp_min(1e-30)
        for child in children
        for each in [child.second.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1).sum(-1)]
    )
    assert isinstance(energy, Tensor)
    widest = max(child.channels for child in children)
    return energy.argsort(descending=True, stable=True).reshape(widest, -1).T.flatten()


def _disjoint(swaps: Tensor, found: Tensor, best: float, bucket: int) -> list[int]:
    """The swaps that help on their own, best first, without those that share a bucket with an earlier one."""
    taken: set[int] = set()
    chosen = []
    buckets = (swaps // bucket).tolist()
    for number in found.argsort(stable=True)[: int((found < best).sum())].tolist():
        if taken.isdisjoint(buckets[number]):
            taken.update(buckets[number])
            chosen.append(number)
    return chosen
