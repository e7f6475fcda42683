"""Finds groups of channels that can be permuted without changing what a model computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import arguments_of, evaluating
from factorpack.comparison.permute.channel_operations import RULES, Rule, Value, elementwise, freeze_all
from factorpack.comparison.permute.ties import Axis, Ties
from factorpack.errors import SourceError
from factorpack.source import Source, open_source


@dataclass(frozen=True, slots=True)
class Place:
    """A dimension of a state-dict tensor that holds a group's channels, `repeat` elements each."""

    tensor: str
    dimension: int
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Channels that share one order in all `places`; `frozen` is the reason if that order may not change."""

    size: int
    places: tuple[Place, ...]
    frozen: str = ""


def find_groups(model: nn.Module, example: Any) -> tuple[Group, ...]:
    """Traces channels through a model that runs on `example`, a batch of at least two inputs.

    torch.export traces the model, so only what its forward does with this kind of input counts. The model's
    inputs and outputs are frozen, and so are the inputs of operations without a rule. Dimensions that are
    never channels, such as a kernel's height, belong to no group.
    """
    with evaluating(model), torch.no_grad():
        positional, named = arguments_of(model, example)
        try:
            program = torch.export.export(model, positional, named, strict=False)
        except Exception as error:  # tracing can fail in any way
            reason = str(error).splitlines()[0] if str(error) else ""
            raise SourceError(f"the model cannot be traced: {type(error).__name__}: {reason}") from error
    return _ChannelTracer(program, open_source(model)).groups()


class _ChannelTracer:
    """One pass over a traced model, in execution order."""

    def __init__(self, program: torch.export.ExportedProgram, source: Source) -> None:
        self._ties = Ties()
        self._source = source
        self._tensors: dict[str, Value] = {}
        signature = program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        values: dict[torch.fx.Node, Value | None] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._placeholder(node, names.get(node.name))
            elif node.op == "output":
                freeze_all(self._ties, self._resolve(node.args, values), "the model's output")
            else:
                values[node] = self._apply_rule(node, values)

    def groups(self) -> tuple[Group, ...]:
        places: dict[int, list[Place]] = defaultdict(list)
        for name, value in self._tensors.items():
            for dimension, axis in enumerate(value.axes):
                root = self._ties.resolve(axis)
                places[root.group].append(Place(name, dimension, root.repeat))
        return tuple(
            Group(self._ties.size(Axis(root)), tuple(found), self._ties.frozen(Axis(root)))
            for root, found in places.items()
            if self._ties.size(Axis(root)) > 1 and any(place.dimension < 2 for place in found)
        )

    def _placeholder(self, node: torch.fx.Node, name: str | None) -> Value | None:
        """A state-dict tensor, tied ones resolved to one; or a frozen input."""
        name = self._source.aliases.get(name, name) if name is not None else None
        if name is None or name not in self._source.entries:
            return self._frozen_value(node, "the model's input" if name is None else "not in the state dict")
        if name not in self._tensors:
            shape = self._source.entries[name].shape
            self._tensors[name] = Value(tuple(self._ties.fresh(size) for size in shape))
        return self._tensors[name]

    def _apply_rule(self, node: torch.fx.Node, values: Mapping[torch.fx.Node, Value | None]) -> Value | None:
        rule = _find_rule(node)
        result = node.meta.get("val")
        if rule is None or not isinstance(result, Tensor):
            operation = getattr(node.target, "__name__", str(node.target))
            reason = f"no rule for the operation {operation}"
            freeze_all(self._ties, self._resolve((node.args, node.kwargs), values), reason)
            return self._frozen_value(node, reason)
        return Value(rule(self._ties, tuple(result.shape), self._bind_arguments(node, values)))

    def _bind_arguments(
        self, node: torch.fx.Node, values: Mapping[torch.fx.Node, Value | None]
    ) -> dict[str, Any]:
        """The arguments by name, defaults included."""
        assert isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
        defaults = {argument.name: argument.default_value for argument in schema}
        return {
            name: self._resolve(value, values) for name, value in (defaults | given | node.kwargs).items()
        }

    def _resolve(self, argument: Any, values: Mapping[torch.fx.Node, Any]) -> Any:
        return torch.fx.node.map_arg(argument, values.__getitem__)

    def _frozen_value(self, node: torch.fx.Node, reason: str) -> Value | None:
        result = node.meta.get("val")
        if not isinstance(result, Tensor):
            return None
        return Value(tuple(self._ties.fresh(int(size), reason) for size in result.shape))


def _find_rule(node: torch.fx.Node) -> Rule | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    rule = RULES.get(node.target.overloadpacket.__name__.removesuffix("_"))
    return elementwise if rule is None and torch.Tag.pointwise in node.target.tags else rule
