"""Calibration: what a model's layers see and answer on a few real inputs."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import batch_size, evaluating, forward, inputs_of, mask_of
from factorpack.errors import SourceError
from factorpack.record import LayerMoments, LayerSample
from factorpack.solve.moments import MomentsOf

MOST_ROWS = 1 << 17
"""Positions that are enough for the moments of any layer with few inputs."""


class _ReachedLayer(Exception):
    """Ends a forward pass whose rest nobody needs."""


class Calibration:
    """A few inputs, kept as the batches they came in, and the order in which layers use them.

    Nothing but the inputs is stored: a layer's activations are computed when they are asked for, by
    running the model up to that layer, so memory is one layer's and not the network's.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], samples: int = 64) -> None:
        self.batches = _take(batches, samples)
        runs = _executions(model, self.batches[0])
        self.order = list(dict.fromkeys(runs))
        self._repeated = {name for name, count in Counter(runs).items() if count > 1}

    def __len__(self) -> int:
        return sum(batch_size(batch) for batch in self.batches)

    def split(self, share: float) -> tuple[Calibration, Calibration]:
        """All but the last `share` of the inputs, and those; at least one each."""
        total = len(self)
        if total < 2:
            raise SourceError("one calibration sample cannot be split in two, expected at least two")
        held = min(max(round(share * total), 1), total - 1)
        parts: tuple[list[Any], list[Any]] = ([], [])
        place = 0
        for batch in self.batches:
            size = batch_size(batch)
            cut = min(max(total - held - place, 0), size)
            for part, piece in zip(parts, (_slice(batch, 0, cut), _slice(batch, cut, size)), strict=True):
                if batch_size(piece):
                    part.append(piece)
            place += size
        first, second = copy.copy(self), copy.copy(self)
        first.batches, second.batches = parts
        return first, second

    def sample(self, name: str, original: nn.Module, compressed: nn.Module) -> LayerSample:
        """Inputs of layer `name` in the compressed network, outputs of it in the original one."""
        layer = original.get_submodule(name)
        inputs, outputs = [], []
        for batch in self.batches:
            inputs.append(_input_of(compressed, name, batch))
            seen = inputs[-1] if compressed is original else _input_of(original, name, batch)
            with torch.no_grad():
                outputs.append(layer(seen))
        _check_finite(name, [*inputs, *outputs])

        def apply(weight: Tensor, values: Tensor) -> Tensor:
            answer: Tensor = torch.func.functional_call(layer, {"weight": weight}, (values,))
            return answer

        return LayerSample(torch.cat(inputs), torch.cat(outputs), apply)

    def moments(
        self, layers: Sequence[str], original: nn.Module, compressed: nn.Module | None = None
    ) -> dict[str, LayerMoments]:
        """Second moments of the inputs of some layers, of all batches, in one pass over them.

        With `compressed` they are those the compressed network feeds the layers, beside the original's. A
        layer that runs several times counts each time.
        """
        gathered = {
            name: MomentsOf(original.get_submodule(name), self._rows(original, name)) for name in layers
        }
        ends = len(layers) == 1 and layers[0] not in self._repeated
        for batch in self.batches:
            wanted = _layer_inputs(original, layers, batch, ends)
            seen = wanted if compressed is None else _layer_inputs(compressed, layers, batch, ends)
            for name, running in gathered.items():
                _check_finite(name, [*wanted[name], *seen[name]])
                for mine, originals in zip(seen[name], wanted[name], strict=True):
                    running.add(mine, None if compressed is None else originals)
        return {name: running.result() for name, running in gathered.items()}

    def _rows(self, model: nn.Module, name: str) -> int:
        """Positions to take of a batch: enough of all batches together to know a layer's K inputs well."""
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        return math.ceil(max(MOST_ROWS, 16 * weight[0].numel()) / len(self.batches))


def calibrate(model: nn.Module, batches: Iterable[Any], samples: int = 64) -> Calibration:
    """Takes the first `samples` inputs of `batches` and learns in which order the model's layers run.

    A batch is a tensor, a (inputs, labels) pair whose labels are ignored, or a dictionary of keyword
    arguments (or of whatever a forward takes as one), on the model's device or not. Of texts, an
    `attention_mask` in it says which tokens count.
    """
    if samples < 1:
        raise SourceError(f"{samples} calibration samples, expected at least one")
    with evaluating(model):
        return Calibration(model, batches, samples)


def _slice(inputs: Any, start: int, stop: int) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[start:stop]
    return {key: value[start:stop] for key, value in inputs.items()}


def _take(batches: Iterable[Any], samples: int) -> list[Any]:
    """The first `samples` inputs, batch by batch."""
    taken: list[Any] = []
    left = samples
    for batch in [batches] if isinstance(batches, Tensor) else batches:
        inputs, size = inputs_of(batch), min(batch_size(batch), left)
        if size:
            taken.append(_slice(inputs, 0, size))
        left -= size
        if left == 0:
            break
    if left == samples:
        raise SourceError("the calibration data has no samples")
    return taken


def _executions(model: nn.Module, batch: Any) -> list[str]:
    """Names of the modules that have a weight of their own, in the order in which they run."""
    order: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, _args, name=name: order.append(name))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor)
    ]
    try:
        _run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return order


def _input_of(model: nn.Module, name: str, batch: Any) -> Tensor:
    """The first input layer `name` gets when the model runs on a batch."""
    found: list[Tensor] = []

    def catch(_module: nn.Module, arguments: Sequence[Any]) -> None:
        found.append(arguments[0])
        raise _ReachedLayer

    hook = model.get_submodule(name).register_forward_pre_hook(catch)
    try:
        _run(model, batch)
    finally:
        hook.remove()
    if not found or not isinstance(found[0], Tensor):
        raise SourceError(f"layer {name!r} does not run on the calibration data, so nothing is known of it")
    return found[0]


def _layer_inputs(model: nn.Module, names: Sequence[str], batch: Any, ends: bool) -> dict[str, list[Tensor]]:
    """What each of some layers gets, call by call, when the model runs on a batch.

    A pass that `ends` does so at the first of them: the rest of the network has nothing to add.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    mask = mask_of(batch)

    def catch(name: str) -> Callable[[nn.Module, Sequence[Any]], None]:
        def hook(module: nn.Module, arguments: Sequence[Any]) -> None:
            seen = _unpadded(module, arguments[0].detach(), mask)
            if ends:
                found[name].append(seen)
                raise _ReachedLayer
            found[name].append(seen.clone())  # what follows may work in place

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(catch(name)) for name in names]
    try:
        _run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    idle = [name for name, inputs in found.items() if not inputs]
    if idle:
        raise SourceError(
            f"layer {idle[0]!r} does not run on the calibration data, so nothing is known of it"
        )
    return found


def _unpadded(module: nn.Module, inputs: Tensor, mask: Tensor | None) -> Tensor:
    """The inputs of a linear layer at real tokens alone: (tokens, K)."""
    if mask is None or not isinstance(module, nn.Linear) or inputs.shape[:-1] != mask.shape:
        return inputs
    return inputs[mask.to(inputs.device)]


def _run(model: nn.Module, batch: Any) -> None:
    try:
        with torch.no_grad():
            forward(model, batch)
    except _ReachedLayer:
        pass
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        values = batch if isinstance(batch, Mapping) else {"inputs": batch}
        shapes = {key: tuple(value.shape) for key, value in values.items()}
        raise SourceError(f"the model fails on a calibration batch of shape {shapes}: {error}") from error


def _check_finite(name: str, tensors: Sequence[Tensor]) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise SourceError(f"layer {name!r} sees or gives NaN or infinity on the calibration data")
