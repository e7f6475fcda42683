"""`export`: torch's exporter draws the graph, the packed weights go in."""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.errors import PlanError, SourceError
from factorpack.format.atomic import atomic_write
from factorpack.format.overwrite import check_output
from factorpack.kinds import KINDS
from factorpack.onnx.proto import optimised, pack_initialisers, strip_traces
from factorpack.onnx.writers import WRITERS
from factorpack.packed import Packed

LEAST_OPSET = 18
"""The first that can take bits apart, and the first torch's exporter writes."""
MOST_BYTES = (1 << 31) - 1
"""What one protocol buffer may be."""
_NEEDED = ("onnx", "onnxscript")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export made.

    `rebuilt` names the tensors stored packed, `absent` the coded weights that the graph lacks, and `plain` those
    of a kind that no graph rebuilds: they are stored as plain values.
    """

    bytes: int
    rebuilt: tuple[str, ...]
    absent: tuple[str, ...]
    plain: tuple[str, ...] = ()


def export(
    packed: Packed,
    model: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    path: str | Path,
    *,
    opset: int = 21,
    dynamic_batch: bool = False,
) -> Exported:
    """Writes an ONNX file whose initialisers are the packed codes; the graph rebuilds each weight from them.

    `example` is what the model is called with: a tensor, a tuple of positional arguments or a mapping of
    named ones. With `dynamic_batch` the first dimension of every tensor in it stays open; give it two
    samples or more then. The model itself is not changed. Needs `pip install 'factorpack[onnx]'`.

    >>> fp.onnx.export(packed, model, torch.zeros(1, 3, 224, 224), "model.onnx")  # doctest: +SKIP
    """
    _expect_onnx()
    if opset < LEAST_OPSET:
        raise PlanError(f"opset is {opset}, allowed are {LEAST_OPSET} and above")
    check_output(Path(path), packed.path)
    # The decoded weights go along: whatever the graph holds under no name of ours is then right all the same.
    decoded = packed.load_into(copy.deepcopy(model).cpu()).eval()
    proto = optimised(_traced(decoded, example, opset, dynamic_batch), packed)
    strip_traces(proto)
    rebuilt = pack_initialisers(proto, packed)
    size = proto.ByteSize()
    if size > MOST_BYTES:
        raise PlanError(f"the ONNX file would be {size} bytes, one holds {MOST_BYTES} at most")
    with atomic_write(Path(path)) as file:
        file.write(proto.SerializeToString())
    there = {packed.aliases.get(name, name) for name in rebuilt}
    coded = {name: encoded.kind for name, encoded in packed.items() if KINDS[encoded.kind].is_coded}
    plain = tuple(name for name, kind in coded.items() if kind not in WRITERS)
    absent = tuple(name for name in coded if name not in there and name not in plain)
    return Exported(size, rebuilt, absent, plain)


def _expect_onnx() -> None:
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise PlanError(
                f"an ONNX export needs {' and '.join(_NEEDED)}, and {error.name} is not installed: "
                "pip install 'factorpack[onnx]'"
            ) from error


def _traced(model: nn.Module, example: Any, opset: int, dynamic_batch: bool) -> Any:
    """The model's graph as a ModelProto: every weight stands in it under its own name."""
    named = dict(example) if isinstance(example, Mapping) else {}
    placed = () if named else (example,) if isinstance(example, Tensor) else tuple(example)
    open_shapes = {name: _open(value) for name, value in named.items()} or tuple(map(_open, placed))
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                model,
                placed,
                kwargs=named,
                opset_version=opset,
                dynamic_shapes=open_shapes if dynamic_batch else None,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise SourceError(f"torch cannot export the model: {error}") from error
    assert program is not None
    return program.model_proto


def _open(value: Any) -> dict[int, str] | None:
    return {0: "batch"} if isinstance(value, Tensor) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter warns of its own insides: what will be deprecated, what is not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)
