"""The blocks of a model: modules with one input and one output tensor, in execution order."""

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
    """Stops a forward pass once the block is reached."""


@dataclass(slots=True)
class _ModuleRun:
    """How a module ran: its place in the order, how often, and whether with one tensor in and one out."""

    order: int
    calls: int = 0
    one_to_one: bool = True


def blocks_of(
    model: nn.Module, batch: Any, weights: Sequence[str], requested: Sequence[str] | None
) -> list[str]:
    """Names of the blocks that hold any of `weights`, in execution order.

    By default, a block is the largest module below the model with one tensor in and one out that is not a
    chain of such modules: a residual block of a ResNet, an encoder layer of a transformer. Weights outside
    of those form blocks of one layer.
    """
    seen = _observe(model, batch)
    if requested is None:
        layers = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
        found = [name for key, child in model.named_children() for name in _split(child, key, layers, seen)]
        found = [name for name in found if _weights_in(name, weights)]
    else:
        known = dict(model.named_modules())
        unknown = [name for name in requested if name not in known]
        if unknown:
            raise PlanError(f"the model has no module {unknown[0]!r} to be a block")
        found = list(requested)
    for name in found:
        if not _usable(seen.get(name)):
            raise SourceError(
                f"block {name!r} does not run exactly once with one tensor in and one out: name other blocks"
            )
    return sorted((name for name in found if _weights_in(name, weights)), key=lambda name: seen[name].order)


def block_sample(model: nn.Module, name: str, batches: Sequence[Any], output: bool) -> Tensor:
    """A block's inputs or outputs over all batches; the model runs only that far."""
    found: list[Tensor] = []

    def catch(_module: nn.Module, arguments: Any, result: Any = None) -> None:
        found.append((result if output else arguments[0]).detach().clone())
        raise _Reached

    block = model.get_submodule(name)
    hook = block.register_forward_hook(catch) if output else block.register_forward_pre_hook(catch)
    try:
        for batch in batches:
            _run(model, batch)
    finally:
        hook.remove()
    return torch.cat(found)


def _split(module: nn.Module, name: str, layers: Sequence[str], seen: Mapping[str, _ModuleRun]) -> list[str]:
    if not _weights_in(name, layers):
        return []
    children = [(f"{name}.{key}", child) for key, child in module.named_children()]
    if not children or (_usable(seen.get(name)) and not _is_chain(module, name, layers)):
        return [name]
    return [block for key, child in children for block in _split(child, key, layers, seen)]


def _is_chain(module: nn.Module, name: str, layers: Sequence[str]) -> bool:
    """Whether a container in it, or the module itself, has a child with weights of several layers."""
    return any(
        len(_weights_in(".".join(filter(None, (name, inner, key))), layers)) > 1
        for inner, container in module.named_modules()
        if isinstance(container, _CONTAINERS)
        for key, _ in container.named_children()
    )


def _weights_in(name: str, weights: Sequence[str]) -> list[str]:
    return [weight for weight in weights if weight.startswith(f"{name}.")]


def _usable(seen: _ModuleRun | None) -> bool:
    return seen is not None and seen.calls == 1 and seen.one_to_one


def _observe(model: nn.Module, batch: Any) -> dict[str, _ModuleRun]:
    seen: dict[str, _ModuleRun] = {}

    def before(name: str) -> None:
        seen.setdefault(name, _ModuleRun(len(seen))).calls += 1

    def after(name: str, arguments: Any, named: Any, result: Any) -> None:
        one = len(arguments) == 1 and not named and isinstance(arguments[0], Tensor)
        seen[name].one_to_one &= one and isinstance(result, Tensor)

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda _module, _arguments, name=name: before(name)))
        hooks.append(
            module.register_forward_hook(
                lambda _module, arguments, named, result, name=name: after(name, arguments, named, result),
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
