"""Reorders a model's channels: the same function, the same names and shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import evaluating, forward
from factorpack.budget.outputs import predictions_of
from factorpack.comparison.permute.channel_groups import Group, find_groups
from factorpack.comparison.permute.order_search import Child, search_order
from factorpack.errors import PlanError, WeightError

TileOf = Callable[[str, tuple[int, ...]], int]
"""Name and shape of a weight -> elements per tile; 0 if it is not cut into tiles."""
MAX_CHANGE = 1e-2
"""Relative difference of the outputs beyond which the permutation must be wrong."""


@dataclass(frozen=True, slots=True)
class Searched:
    """A permuted group and its objective before and after: log det per element, in nats, lower is better.

    `children` are the weights it was optimised for. The tiles of `uncounted` weights run along the group too,
    but do not hold several whole channels, or hold a number that does not divide the group.
    """

    group: Group
    children: tuple[str, ...]
    uncounted: tuple[str, ...]
    order: Tensor
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Permuted:
    """What was permuted, which groups were left alone and why, and how much the outputs changed."""

    searched: tuple[Searched, ...]
    left: tuple[tuple[Group, str], ...]
    change: float


def tile_of_kernels(_name: str, shape: tuple[int, ...]) -> int:
    """Tiles of 8 elements for a linear layer or 1x1 convolution, of two kernels for any other convolution."""
    kernel = torch.Size(shape[2:]).numel()
    return 8 if kernel == 1 else 2 * kernel


def permute_model(
    model: nn.Module,
    example: Any,
    *,
    tile_of: TileOf = tile_of_kernels,
    iterations: int = 1000,
    seed: int = 0,
) -> tuple[nn.Module, Permuted]:
    """Returns a copy of the model whose tiles are easier to quantize, and a report.

    Only values change: names and shapes stay, so a file packed from the copy loads into the model's own
    class. `example` is a batch of at least two inputs. A weight that reads n channels of u elements each needs
    memory for (n u)^2 values while its group is searched. After "Permute, Quantize, and Fine-tune" (Martinez
    et al., 2021).
    """
    if iterations < 0:
        raise PlanError(f"{iterations} search iterations, expected 0 or more")
    found = find_groups(model, example)
    state = model.state_dict()
    searched: list[Searched] = []
    left: list[tuple[Group, str]] = []
    for group in found:
        along = [] if group.frozen else _along(group, state)
        children = {name: child for name in along if (child := _child(group, name, state[name], tile_of))}
        if not children:
            left.append((group, group.frozen or "no weight has tiles over several of its channels"))
            continue
        best = search_order(list(children.values()), iterations, torch.Generator().manual_seed(seed))
        uncounted = tuple(name for name in along if name not in children)
        searched.append(Searched(group, tuple(children), uncounted, best.order, best.before, best.after))
    permuted = copy.deepcopy(model)
    reorder(permuted, ((each.group, each.order) for each in searched))
    return permuted, Permuted(tuple(searched), tuple(left), _change(model, permuted, example))


def reorder(model: nn.Module, orders: Iterable[tuple[Group, Tensor]]) -> None:
    """Moves channel `order[i]` of each group to position i, in every tensor that has the group."""
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for group, order in orders:
            if group.frozen:
                raise PlanError(f"the channels of {group.places[0].tensor!r} may not move: {group.frozen}")
            if not torch.equal(order.sort().values, torch.arange(group.size, device=order.device)):
                raise PlanError(f"the order of {len(order)} is not a permutation of {group.size} channels")
            for place in group.places:
                tensor = state[place.tensor]
                within = torch.arange(place.repeat, device=order.device)
                index = (order[:, None] * place.repeat + within).flatten().to(tensor.device)
                tensor.copy_(tensor.index_select(place.dimension, index))


def _along(group: Group, state: dict[str, Tensor]) -> list[str]:
    """Weights whose tiles, read in the order out, in, h, w, run along the group's channels."""
    return [
        place.tensor
        for place in group.places
        if place.dimension == 1 and state[place.tensor].is_floating_point()
    ]


def _child(group: Group, name: str, weight: Tensor, tile_of: TileOf) -> Child | None:
    """The weight in the form the search needs; None unless each tile holds several whole channels."""
    tile = tile_of(name, tuple(weight.shape))
    if tile < 0:
        raise PlanError(f"tiles of {tile} elements for {name!r}, expected 1 or more, or 0 for none")
    unit = weight[0].numel() // group.size
    channels, rest = divmod(tile, unit)
    if channels < 2 or rest or group.size % channels:
        return None
    return Child.of(weight.reshape(len(weight), group.size, unit), channels)


def _change(model: nn.Module, permuted: nn.Module, example: Any) -> float:
    with evaluating(model), evaluating(permuted), torch.no_grad():
        before, after = (predictions_of(forward(each, example)).values.double() for each in (model, permuted))
    change = float((after - before).norm() / before.norm().clamp_min(1e-30))
    if not change <= MAX_CHANGE:
        raise WeightError(f"the permuted model's outputs differ by {change:.1e} of their norm")
    return change
