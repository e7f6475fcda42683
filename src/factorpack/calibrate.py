"""Calibration: the inputs and outputs of a model's layers on a few real samples."""

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
from factorpack.solve.moments import MomentAccumulator

ENOUGH_ROWS = 1 << 17
"""Positions that suffice for the moments of a layer with few inputs."""


class _ReachedLayer(Exception):
    """Stops a forward pass once the layer's input is known."""


class Calibration:
    """A few inputs, in their original batches, and the order in which the model's layers run.

    Only the inputs are stored: a layer's activations are computed on demand by running the model up to
    that layer, so memory is that of one layer, not of the whole network.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], samples: int = 64) -> None:
        self.batches = _take_samples(batches, samples)
        runs = _execution_order(model, self.batches[0])
        self.order = list(dict.fromkeys(runs))
        self._repeated = {name for name, count in Counter(runs).items() if count > 1}

    def __len__(self) -> int:
        return sum(batch_size(batch) for batch in self.batches)

    def split(self, share: float) -> tuple[Calibration, Calibration]:
        """Splits off the last `share` of the inputs; each part has at least one."""
        total = len(self)
        if total < 2:
            raise SourceError("one calibration sample cannot be split in two, expected at least two")
        held = min(max(round(share * total), 1), total - 1)
        parts: tuple[list[Any], list[Any]] = ([], [])
        start = 0
        for batch in self.batches:
            size = batch_size(batch)
            cut = min(max(total - held - start, 0), size)
            for part, piece in zip(parts, (_slice(batch, 0, cut), _slice(batch, cut, size)), strict=True):
                if batch_size(piece):
                    part.append(piece)
            start += size
        first, second = copy.copy(self), copy.copy(self)
        first.batches, second.batches = parts
        return first, second

    def sample(self, name: str, original: nn.Module, compressed: nn.Module) -> LayerSample:
        """Inputs of layer `name` in the compressed network, and its outputs in the original one."""
        layer = original.get_submodule(name)
        inputs, outputs = [], []
        for batch in self.batches:
            inputs.append(_first_input(compressed, name, batch))
            seen = inputs[-1] if compressed is original else _first_input(original, name, batch)
            with torch.no_grad():
                outputs.append(layer(seen))
        _check_finite(name, [*inputs, *outputs])

        def apply(weight: Tensor, values: Tensor) -> Tensor:
            output: Tensor = torch.func.functional_call(layer, {"weight": weight}, (values,))
            return output

        return LayerSample(torch.cat(inputs), torch.cat(outputs), apply)

    def moments(
        self, layers: Sequence[str], original: nn.Module, compressed: nn.Module | None = None
    ) -> dict[str, LayerMoments]:
        """Second moments of the inputs of some layers, over all batches in one pass.

        With `compressed`, the inputs are those in the compressed network, paired with the original's. A
        layer that runs several times counts each time.
        """
        gathered = {
            name: MomentAccumulator(original.get_submodule(name), self._rows_per_batch(original, name))
            for name in layers
        }
        stop_early = len(layers) == 1 and layers[0] not in self._repeated
        for batch in self.batches:
            originals = _layer_inputs(original, layers, batch, stop_early)
            seen = originals if compressed is None else _layer_inputs(compressed, layers, batch, stop_early)
            for name, running in gathered.items():
                _check_finite(name, [*originals[name], *seen[name]])
                for mine, original_input in zip(seen[name], originals[name], strict=True):
                    running.add(mine, None if compressed is None else original_input)
        return {name: running.result() for name, running in gathered.items()}

    def _rows_per_batch(self, model: nn.Module, name: str) -> int:
        """Positions to use per batch, so that all batches together cover a layer's K inputs well."""
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        return math.ceil(max(ENOUGH_ROWS, 16 * weight[0].numel()) / len(self.batches))


def calibrate(model: nn.Module, batches: Iterable[Any], samples: int = 64) -> Calibration:
    """Takes the first `samples` inputs of `batches` and records the order in which the model's layers run.

    A batch is a tensor, an (inputs, labels) pair whose labels are ignored, or a dictionary of keyword
    arguments (or one that the forward takes as a single argument), on any device. In batches of text,
    `attention_mask` marks the tokens that count.
    """
    if samples < 1:
        raise SourceError(f"{samples} calibration samples, expected at least one")
    with evaluating(model):
        return Calibration(model, batches, samples)


def _slice(inputs: Any, start: int, stop: int) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[start:stop]
    return {key: value[start:stop] for key, value in inputs.items()}


def _take_samples(batches: Iterable[Any], samples: int) -> list[Any]:
    """The first `samples` inputs, in their batches."""
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


def _execution_order(model: nn.Module, batch: Any) -> list[str]:
    """Names of the modules with a weight, in the order they run."""
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


def _first_input(model: nn.Module, name: str, batch: Any) -> Tensor:
    """The first input of layer `name` when the model runs on a batch."""
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
        raise SourceError(f"layer {name!r} does not run on the calibration data, so it cannot be calibrated")
    return found[0]


def _layer_inputs(
    model: nn.Module, names: Sequence[str], batch: Any, stop_early: bool
) -> dict[str, list[Tensor]]:
    """The inputs of some layers, one per call, when the model runs on a batch.

    With `stop_early` the pass stops at the first of them: the rest of the network is not needed.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    mask = mask_of(batch)

    def catch(name: str) -> Callable[[nn.Module, Sequence[Any]], None]:
        def hook(module: nn.Module, arguments: Sequence[Any]) -> None:
            seen = _drop_padding(module, arguments[0].detach(), mask)
            if stop_early:
                found[name].append(seen)
                raise _ReachedLayer
            found[name].append(seen.clone())  # later modules may work in place

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
            f"layer {idle[0]!r} does not run on the calibration data, so it cannot be calibrated"
        )
    return found


def _drop_padding(module: nn.Module, inputs: Tensor, mask: Tensor | None) -> Tensor:
    """A linear layer's inputs without padding: (tokens, K)."""
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
        raise SourceError(
            f"layer {name!r} has NaN or infinity in its input or output on the calibration data"
        )
