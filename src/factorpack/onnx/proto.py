"""Packed weights in an ONNX model: initialisers are replaced by nodes that rebuild them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from factorpack.onnx.sketch import INT4_OPSET, Sketch, Type
from factorpack.onnx.writers import rebuild, saves
from factorpack.record import Encoded

_INT4_IR = 10
"""The IR version that introduced opset 21."""


def pack_initialisers(model: Any, packed: Mapping[str, Encoded]) -> tuple[str, ...]:
    """Replaces, in a ModelProto, every initialiser that `packed` holds in a smaller form.

    Returns the replaced names. The graph uses the same names as before.
    """
    graph = model.graph
    opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    sketch, rest, replaced = Sketch(opset, _names(graph)), [], []
    for found in graph.initializer:
        encoded = packed.get(found.name)
        if encoded is None or not _fits(found, encoded):
            rest.append(found)
            continue
        rebuild(sketch, encoded, Type(found.data_type), found.name)
        replaced.append(found.name)
    _set(graph.initializer, [*rest, *_tensors(sketch)])
    _set(graph.node, [*_nodes(sketch), *graph.node])
    if opset >= INT4_OPSET:
        model.ir_version = max(model.ir_version, _INT4_IR)
    return tuple(replaced)


def optimise(model: Any, weights: Container[str]) -> Any:
    """Folds constants, except the named weights, which are presented as inputs meanwhile.

    Folding a norm into a convolution would change the values under a weight's name, and a file without
    any folding makes onnxruntime slow: the exporter writes a zero bias as six nodes.
    """
    from onnx.helper import make_tensor_value_info
    from onnxscript.optimizer import optimize

    graph = model.graph
    hidden = [each for each in graph.initializer if each.name in weights]
    count = len(graph.input)
    _set(graph.initializer, [each for each in graph.initializer if each.name not in weights])
    graph.input.extend(make_tensor_value_info(each.name, each.data_type, each.dims) for each in hidden)
    optimal = optimize(model)
    del optimal.graph.input[count:]
    used = _names(optimal.graph)
    optimal.graph.initializer.extend(each for each in hidden if each.name in used)
    return optimal


def strip_traces(model: Any) -> None:
    """Drops the exporter's metadata: its stack traces are larger than packed weights."""
    graph = model.graph
    for holder in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del holder.metadata_props[:]
    del graph.value_info[:]


def _fits(found: Any, encoded: Encoded) -> bool:
    """Whether an initialiser still has its tensor's shape, and is larger than the nodes that rebuild it."""
    return tuple(found.dims) == encoded.shape and saves(encoded, Type(found.data_type))


def _names(graph: Any) -> frozenset[str]:
    listed = (each.name for each in (*graph.initializer, *graph.input, *graph.output))
    return frozenset([*listed, *(name for node in graph.node for name in (*node.input, *node.output))])


def _tensors(sketch: Sketch) -> list[Any]:
    from onnx import TensorProto

    return [
        TensorProto(name=name, data_type=int(each.type), dims=each.shape, raw_data=each.data)
        for each, name in sketch.stored.items()
    ]


def _nodes(sketch: Sketch) -> list[Any]:
    from onnx.helper import make_node

    return [make_node(node.operator, node.inputs, [node.output], **node.attributes) for node in sketch.nodes]


def _set(field: Any, values: Iterable[Any]) -> None:
    """Replaces the contents of a repeated field."""
    kept = list(values)
    del field[:]
    field.extend(kept)
