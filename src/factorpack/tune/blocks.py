"""The blocks of a model: units with one tensor in and one out, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import forward
from factorpack.errors import PlanError, SourceError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Reached(Exception):
    """Ends a forward pass whose rest nobody needs."""


@dataclass(slots=True)
class _Seen:
    """How a module ran: when for the first time, how often, and whether on one tensor, giving one."""

    order: int
    calls: int = 0
    plain: bool = True


def blocks_of(model: nn.Module, batch: Any, weights: Sequence[str], asked: Sequence[str] | None) -> list[str]:
    """Names of the blocks that hold any of `weights`, in execution order.

    Unless asked for, a block is the largest module below the model that has one tensor in and out and is
    no chain of such modules: a residual block of a ResNet, an encoder layer of a transformer. Weights
    outside of those are blocks of one layer.
    """
    seen = _observe(model, batch)
    if asked is None:
        layers = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
        found = [name for key, child in model.named_children() for name in _split(child, key, layers, seen)]
        found = [name for name in found if _held(name, weights)]
    else:
        known = dict(model.named_modules())
        strangers = [name for name in asked if name not in known]
        if strangers:
            raise PlanError(f"the model has no module {strangers[0]!r} to be a block")
        found = list(asked)
    for name in found:
        if not _usable(seen.get(name)):
            raise SourceError(f"block {name!r} is not run once, on one tensor and giving one: name others")
    return sorted((name for name in found if _held(name, weights)), key=lambda name: seen[name].order)


def block_sample(model: nn.Module, name: str, batches: Sequence[Any], output: bool) -> Tensor:
    """What a block is given, or what it answers, over all batches: the model is run no further than that."""
    found: list[Tensor] = []

    def catch(_module: nn.Module, arguments: Any, answer: Any = None) -> None:
        found.append((answer if output else arguments[0]).detach().clone())
        raise _Reached

    block = model.get_submodule(name)
    hook = block.register_forward_hook(catch) if output else block.register_forward_pre_hook(catch)
    try:
        for batch in batches:
            _run(model, batch)
    finally:
        hook.remove()
    return torch.cat(found)


def _split(module: nn.Module, name: str, layers: Sequence[str], seen: Mapping[str, _Seen]) -> list[str]:
    if not _held(name, layers):
        return []
    children = [(f"{name}.{key}", child) for key, child in module.named_children()]
    if not children or (_usable(seen.get(name)) and not _is_chain(module, name, layers)):
        return [name]
    return [block for key, child in children for block in _split(child, key, layers, seen)]


def _is_chain(module: nn.Module, name: str, layers: Sequence[str]) -> bool:
    """Whether a container in it, itself included, has a part with weights of several layers."""
    return any(
        len(_held(".".join(filter(None, (name, inner, key))), layers)) > 1
        for inner, container in module.named_modules()
        if isinstance(container, _CONTAINERS)
        for key, _ in container.named_children()
    )


def _held(name: str, weights: Sequence[str]) -> list[str]:
    return [weight for weight in weights if weight.startswith(f"{name}.")]


def _usable(seen: _Seen | None) -> bool:
    return seen is not None and seen.calls == 1 and seen.plain


def _observe(model: nn.Module, batch: Any) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}

    def before(name: str) -> None:
        seen.setdefault(name, _Seen(len(seen))).calls += 1

    def after(name: str, arguments: Any, named: Any, answer: Any) -> None:
        one = len(arguments) == 1 and not named and isinstance(arguments[0], Tensor)
        seen[name].plain &= one and isinstance(answer, Tensor)

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _module, _arguments, name=name: before(name)))
        hooks.append(
            module.register_forward_hook(
                lambda _module, arguments, named, answer, name=name: after(name, arguments, named, answer),
                with_kwargs=True,
            )
        )
    try:
        _run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _run(model: nn.Module, batch: Any) -> None:
    try:
        with torch.no_grad():
            forward(model, batch)
    except _Reached:
        pass
