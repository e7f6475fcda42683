"""Calibration: the inputs and outputs of a model's layers on a few real samples."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import (
    StopForward,
    batch_size,
    device_of,
    evaluating,
    hooked,
    inputs_of,
    mask_of,
    merge_batches,
    run,
    slice_batch,
)
from factorpack.errors import SourceError
from factorpack.passes.cuts import find_segments, has_weight
from factorpack.passes.resident import Resident, resident_of
from factorpack.passes.segments import Segments
from factorpack.record import LayerMoments, LayerSample
from factorpack.solve.moments import MomentAccumulator

ENOUGH_ROWS, ENOUGH_PER_INPUT = 1 << 17, 16
"""Positions that suffice for the moments of a layer: in all, and for each of its inputs."""
CHEAP_PRODUCTS = 1 << 35
"""More positions than suffice for each input are used as long as their moments take fewer multiplications."""
_LOGGER = logging.getLogger(__name__)


class Calibration:
    """A few inputs, in their original batches, and the order in which the model's layers run.

    Only the inputs are stored: a layer's activations are computed on demand by running the model up to
    that layer, so memory is that of one layer, not of the whole network.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], samples: int = 64) -> None:
        self.batches, runs = _in_fast_layout(model, _take_samples(batches, samples))
        self.order = list(dict.fromkeys(runs))
        self.repeated = frozenset(name for name, count in Counter(runs).items() if count > 1)
        self._segments: list[Segments] = []  # shared by all parts of a split

    def __len__(self) -> int:
        return sum(batch_size(batch) for batch in self.batches)

    def segments(self, model: nn.Module) -> Segments:
        """Where the model's forward pass can be cut; found once, from the first sample."""
        if not self._segments:
            resident = resident_of(model)
            with evaluating(model):
                self._segments.append(find_segments(model, self.batches[0], resident is not None))
            if resident is not None:
                _hold_segments(resident, self._segments[0])
            if len(self._segments[0]) == 1 and len(self.order) > 1:
                _LOGGER.info(
                    "the model cannot be cut into blocks: its layers' inputs are recomputed from the start "
                    "for each layer"
                )
        return self._segments[0]

    def first(self, count: int) -> Calibration:
        """The first `count` inputs, in their batches."""
        part = copy.copy(self)
        part.batches = _take_samples(self.batches, count)
        return part

    def merged(self, tokens: int) -> Calibration:
        """The same inputs in batches of up to so many tokens, where they are texts of one length."""
        part = copy.copy(self)
        part.batches = merge_batches(self.batches, tokens)
        return part

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
            for part, piece in zip(
                parts, (slice_batch(batch, 0, cut), slice_batch(batch, cut, size)), strict=True
            ):
                if batch_size(piece):
                    part.append(piece)
            start += size
        first, second = copy.copy(self), copy.copy(self)
        first.batches, second.batches = parts
        return first, second

    def sample(self, name: str, original: nn.Module, compressed: nn.Module) -> LayerSample:
        """Inputs of layer `name` in the compressed network, and its outputs in the original one."""
        inputs = [input_of(compressed, name, batch) for batch in self.batches]
        seen = inputs if compressed is original else [input_of(original, name, b) for b in self.batches]
        return self.make_sample(name, original, inputs, seen)

    def make_sample(
        self, name: str, original: nn.Module, inputs: Sequence[Tensor], seen: Sequence[Tensor]
    ) -> LayerSample:
        """A layer's sample from its `inputs`, batch by batch, and those `seen` in the original network."""
        layer = original.get_submodule(name)
        with torch.no_grad():
            outputs = [layer(each) for each in seen]
        self.check_finite(name, original, all_finite([*inputs, *outputs]))

        def apply(weight: Tensor, values: Tensor) -> Tensor:
            output: Tensor = torch.func.functional_call(layer, {"weight": weight}, (values,))
            return output

        return LayerSample(torch.cat(list(inputs)), torch.cat(outputs), apply)

    def moments(
        self, layers: Sequence[str], original: nn.Module, compressed: nn.Module | None = None
    ) -> dict[str, LayerMoments]:
        """Second moments of the inputs of some layers, over all batches in one pass.

        With `compressed`, the inputs are those in the compressed network, paired with the original's. A
        layer that runs several times counts each time.
        """
        gathered = {
            name: MomentAccumulator(original.get_submodule(name), self.rows_per_batch(original, name))
            for name in layers
        }
        stop_early = len(layers) == 1 and layers[0] not in self.repeated
        for batch in self.batches:
            originals = _layer_inputs(original, layers, batch, stop_early)
            seen = originals if compressed is None else _layer_inputs(compressed, layers, batch, stop_early)
            for name, running in gathered.items():
                self.check_finite(name, original, all_finite([*originals[name], *seen[name]]))
                for mine, original_input in zip(seen[name], originals[name], strict=True):
                    running.add(mine, None if compressed is None else original_input)
        return {name: running.result() for name, running in gathered.items()}

    def rows_per_batch(self, model: nn.Module, name: str, share: float = 1.0) -> int:
        """Positions to use per batch, so that all batches together cover a `share` of a layer's K inputs well."""
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        size = weight[0].numel()
        rows = max(min(ENOUGH_ROWS, CHEAP_PRODUCTS // size**2), ENOUGH_PER_INPUT * size)
        return math.ceil(share * rows / len(self.batches))

    def check_finite(self, name: str, model: nn.Module, finite: Tensor) -> None:
        """Raises an error that names the first layer with NaN or infinity where `name` has some."""
        if not bool(finite):
            raise SourceError(
                f"layer {self.first_not_finite(model) or name!r} has NaN or infinity in its input or output "
                "on the calibration data"
            )

    def first_not_finite(self, model: nn.Module) -> str | None:
        """The first layer with NaN or infinity in its input or output; None where they come from elsewhere."""
        for batch in self.batches:
            found: list[str] = []

            def check(name: str, found: list[str] = found) -> Callable[..., None]:
                def hook(_module: nn.Module, inputs: Any, output: Any) -> None:
                    if not bool(all_finite([*inputs, output])):
                        found.append(name)
                        raise StopForward

                return hook

            with hooked(model, after={name: check(name) for name in self.order}):
                run(model, batch)
            if found:
                return found[0]
        return None


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


def _hold_segments(resident: Resident, segments: Segments) -> None:
    """Lets a network hold the weights of a segment while all batches pass through it."""
    if not segments.cuts:
        raise SourceError(
            f"a {type(resident.network).__name__} cannot be cut into blocks that pass one tensor on to the "
            "next, so it cannot be streamed: open the model and compress that"
        )
    resident.hold_blocks([cut.module for cut in segments.cuts])


def _take_samples(batches: Iterable[Any], samples: int) -> list[Any]:
    """The first `samples` inputs, in their batches."""
    taken: list[Any] = []
    left = samples
    for batch in [batches] if isinstance(batches, Tensor) else batches:
        inputs, size = inputs_of(batch), min(batch_size(batch), left)
        if size:
            taken.append(_usable(slice_batch(inputs, 0, size)))
        left -= size
        if left == 0:
            break
    if left == samples:
        raise SourceError("the calibration data has no samples")
    return taken


def _usable(inputs: Any) -> Any:
    """Inputs that autograd accepts: those made under `torch.inference_mode()` are copied."""
    with torch.inference_mode(False):
        if isinstance(inputs, Tensor):
            return inputs.clone() if inputs.is_inference() else inputs
        return {key: _usable(value) for key, value in inputs.items()}


def _in_fast_layout(model: nn.Module, batches: list[Any]) -> tuple[list[Any], list[str]]:
    """The batches, and the order in which layers run: images with their channels last, if the model takes them.

    On a CPU convolutions are a quarter faster so. A model that views an image as a vector refuses them.
    """
    images = device_of(model).type == "cpu" and all(is_image(batch) for batch in batches)
    if images and any(isinstance(module, nn.Conv2d) for module in model.modules()):
        turned = [batch.contiguous(memory_format=torch.channels_last) for batch in batches]
        with suppress(SourceError):
            return turned, _execution_order(model, turned[0])
    return batches, _execution_order(model, batches[0])


def is_image(batch: Any) -> bool:
    """Whether a batch is one of images, (n, channels, height, width)."""
    return isinstance(batch, Tensor) and batch.dim() == 4 and batch.is_floating_point()


def _execution_order(model: nn.Module, batch: Any) -> list[str]:
    """Names of the modules with a weight, in the order they run."""
    order: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda _module, _inputs: order.append(name)

    layers = [name for name, module in model.named_modules() if has_weight(module)]
    with hooked(model, {name: note(name) for name in layers}):
        run(model, batch)
    return order


def input_of(
    model: nn.Module, name: str, batch: Any, passing: Callable[[nn.Module, Any], Any] = run
) -> Tensor:
    """The first input of layer `name` when the model runs on a batch; `passing` runs it."""
    return inputs_of_layers(model, [name], batch, passing)[name]


def inputs_of_layers(
    model: nn.Module,
    names: Sequence[str],
    batch: Any,
    passing: Callable[[nn.Module, Any], Any] = run,
    most_bytes: int = 0,
) -> dict[str, Tensor]:
    """The first inputs of some layers in execution order, from one pass: of the first, and others as memory allows.

    The pass stops at the layer whose input makes them more than `most_bytes`, or at the last.
    """
    found: dict[str, Tensor] = {}

    def catch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, arguments: Sequence[Any]) -> None:
            if isinstance(arguments[0], Tensor):
                found[name] = arguments[0].detach()
            if name == names[-1] or sum(each.nbytes for each in found.values()) > most_bytes:
                raise StopForward
            if name in found:  # a copy, since later modules may work in place
                found[name] = found[name].clone()

        return hook

    with hooked(model, {name: catch(name) for name in names}):
        passing(model, batch)
    if names[0] not in found:
        raise SourceError(
            f"layer {names[0]!r} does not run on the calibration data, so it cannot be calibrated"
        )
    return found


def _layer_inputs(
    model: nn.Module, names: Sequence[str], batch: Any, stop_early: bool
) -> dict[str, list[Tensor]]:
    """The inputs of some layers, one per call, when the model runs on a batch.

    With `stop_early` the pass stops at the first of them: the rest of the network is not needed.
    """
    if stop_early:
        (name,) = names
        return {name: [drop_padding(model.get_submodule(name), input_of(model, name, batch), batch)]}
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def catch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Sequence[Any]) -> None:
            # A copy, since later modules may work in place.
            found[name].append(drop_padding(module, arguments[0].detach(), batch).clone())

        return hook

    with hooked(model, {name: catch(name) for name in names}):
        run(model, batch)
    idle = [name for name, inputs in found.items() if not inputs]
    if idle:
        raise SourceError(
            f"layer {idle[0]!r} does not run on the calibration data, so it cannot be calibrated"
        )
    return found


def drop_padding(module: nn.Module, inputs: Tensor, batch: Any) -> Tensor:
    """A linear layer's inputs without a text batch's padding: (tokens, K)."""
    mask = mask_of(batch)
    if mask is None or not isinstance(module, nn.Linear) or inputs.shape[:-1] != mask.shape:
        return inputs
    return inputs[mask.to(inputs.device)]


def all_finite(values: Sequence[Any]) -> Tensor:
    """Whether all tensors among some values are finite: a tensor, so that a GPU need not be waited for."""
    flags = [value.isfinite().all() for value in values if isinstance(value, Tensor)]
    return torch.stack(flags).all() if flags else torch.tensor(True)
