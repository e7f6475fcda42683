"""`export`: torch's exporter makes the graph, and packed weights replace its initialisers."""

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
from factorpack.format.container import check_target
from factorpack.format.overwrite import check_output
from factorpack.kinds import KINDS
from factorpack.onnx.proto import optimise, pack_initialisers, strip_traces
from factorpack.onnx.writers import WRITERS
from factorpack.packed import Packed

MIN_OPSET = 18
"""The first opset with bitwise operators, and the first that torch's exporter writes."""
MAX_BYTES = (1 << 31) - 1
"""The size limit of a protocol buffer."""
_NEEDED = ("onnx", "onnxscript")


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    `rebuilt` names the tensors stored packed, `absent` the coded weights not in the graph, and `plain` those
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

    `example` is the model's input: a tensor, a tuple of positional arguments or a mapping of keyword
    arguments. With `dynamic_batch` the first dimension of every tensor in it is dynamic; it then needs two
    samples or more. The model itself is not changed. Needs `pip install 'factorpack[onnx]'`.

    >>> fp.onnx.export(packed, model, torch.zeros(1, 3, 224, 224), "model.onnx")  # doctest: +SKIP
    """
    _require_onnx()
    if opset < MIN_OPSET:
        raise PlanError(f"opset is {opset}, allowed are {MIN_OPSET} and above")
    check_output(Path(path), packed.path)
    check_target(Path(path))
    # With the decoded weights loaded, initialisers that are not replaced below are correct too.
    decoded = packed.load_into(copy.deepcopy(model).cpu()).eval()
    proto = optimise(_trace(decoded, example, opset, dynamic_batch), packed)
    strip_traces(proto)
    rebuilt = pack_initialisers(proto, packed)
    size = proto.ByteSize()
    if size > MAX_BYTES:
        raise PlanError(f"the ONNX file would be {size} bytes, allowed are {MAX_BYTES}")
    with atomic_write(Path(path)) as file:
        file.write(proto.SerializeToString())
    present = {packed.aliases.get(name, name) for name in rebuilt}
    coded = {name: encoded.kind for name, encoded in packed.items() if KINDS[encoded.kind].is_coded}
    plain = tuple(name for name, kind in coded.items() if kind not in WRITERS)
    absent = tuple(name for name in coded if name not in present and name not in plain)
    return Exported(size, rebuilt, absent, plain)


def _require_onnx() -> None:
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise PlanError(
                f"an ONNX export needs {' and '.join(_NEEDED)}, and {error.name} is not installed: "
                "pip install 'factorpack[onnx]'"
            ) from error


def _trace(model: nn.Module, example: Any, opset: int, dynamic_batch: bool) -> Any:
    """The model's graph as a ModelProto, with every weight under its own name."""
    named = dict(example) if isinstance(example, Mapping) else {}
    positional = () if named else (example,) if isinstance(example, Tensor) else tuple(example)
    shapes = {name: _batch_axis(value) for name, value in named.items()} or tuple(
        map(_batch_axis, positional)
    )
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                model,
                positional,
                kwargs=named,
                opset_version=opset,
                dynamic_shapes=shapes if dynamic_batch else None,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise SourceError(f"torch cannot export the model: {error}") from error
    assert program is not None
    return program.model_proto


def _batch_axis(value: Any) -> dict[int, str] | None:
    return {0: "batch"} if isinstance(value, Tensor) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings about the exporter's internals: deprecations, optional packages."""
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
