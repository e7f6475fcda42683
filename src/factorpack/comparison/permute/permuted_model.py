"""A model with its channels in another order: the same function, the same names and shapes."""

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
"""Name and shape of a weight -> numbers in one of its tiles; 0 where it is not cut into tiles."""
MOST_CHANGE = 1e-2
"""Relative difference of the answers beyond which something must have been permuted wrongly."""


@dataclass(frozen=True, slots=True)
class Searched:
    """A group that was permuted, and what its search found: log det a number, in nats, lower is better.

    `children` are the weights it was searched for. `uncounted` have the group along their tiles too, but no
    tile of theirs holds several whole channels, or those do not divide the group.
    """

    group: Group
    children: tuple[str, ...]
    uncounted: tuple[str, ...]
    order: Tensor
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Permuted:
    """What was permuted, which groups stayed as they were and why, and how far the answers moved."""

    searched: tuple[Searched, ...]
    left: tuple[tuple[Group, str], ...]
    change: float


def tile_of_kernels(_name: str, shape: tuple[int, ...]) -> int:
    """Tiles of 8 numbers of a linear layer or 1x1 convolution, of two kernels of any other convolution."""
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
    """A copy of the model whose weights fall into tiles that are easier to quantize, and a report.

    Only values change: names and shapes stay, so a file packed from the copy loads into the model's own
    class. `example` is a batch of at least two inputs. A weight that reads n channels of u numbers each takes
    (n u)^2 numbers of memory while its group is searched. After "Permute, Quantize, and Fine-tune" (Martinez
    et al., 2021).
    """
    if iterations < 0:
        raise PlanError(f"{iterations} iterations of a search, expected 0 or more")
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
    """Puts channel `order[i]` of each group in place i, in every tensor of the model that has the group."""
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for group, order in orders:
            if group.frozen:
                raise PlanError(f"the channels of {group.places[0].tensor!r} may not move: {group.frozen}")
            if not torch.equal(order.sort().values, torch.arange(group.size, device=order.device)):
                raise PlanError(f"an order of {len(order)} numbers is none of {group.size} channels")
            for place in group.places:
                tensor = state[place.tensor]
                within = torch.arange(place.repeat, device=order.device)
                index = (order[:, None] * place.repeat + within).flatten().to(tensor.device)
                tensor.copy_(tensor.index_select(place.dimension, index))


def _along(group: Group, state: dict[str, Tensor]) -> list[str]:
    """The weights whose tiles, read in the order out, in, h, w, run along the group's channels."""
    return [
        place.tensor
        for place in group.places
        if place.dimension == 1 and state[place.tensor].is_floating_point()
    ]


def _child(group: Group, name: str, weight: Tensor, tile_of: TileOf) -> Child | None:
    """The weight as the search needs it, where each of its tiles holds several whole channels."""
    tile = tile_of(name, tuple(weight.shape))
    if tile < 0:
        raise PlanError(f"tiles of {tile} numbers for {name!r}, expected 1 or more, or 0 for none")
    unit = weight[0].numel() // group.size
    channels, rest = divmod(tile, unit)
    if channels < 2 or rest or group.size % channels:
        return None
    return Child.of(weight.reshape(len(weight), group.size, unit), channels)


def _change(model: nn.Module, permuted: nn.Module, example: Any) -> float:
    with evaluating(model), evaluating(permuted), torch.no_grad():
        wanted, answer = (
            predictions_of(forward(each, example)).values.double() for each in (model, permuted)
        )
    change = float((answer - wanted).norm() / wanted.norm().clamp_min(1e-30))
    if not change <= MOST_CHANGE:
        raise WeightError(f"the permuted model's answers differ by {change:.1e} of their size")
    return change
