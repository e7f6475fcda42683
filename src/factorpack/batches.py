"""Batches in any of the accepted forms, and running a model on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.errors import SourceError


class StopForward(Exception):
    """Raised in a hook to end a forward pass once what was wanted is known."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; each module's own mode is restored after it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def hooked(
    model: nn.Module,
    before: Mapping[str, Callable[..., Any]] | None = None,
    after: Mapping[str, Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Hooks on the inputs (`before`) and outputs (`after`) of some modules, removed after the block."""
    hooks = []
    try:
        for name, hook in (before or {}).items():
            hooks.append(model.get_submodule(name).register_forward_pre_hook(hook))
        for name, hook in (after or {}).items():
            hooks.append(model.get_submodule(name).register_forward_hook(hook))
        yield
    finally:
        for handle in hooks:
            handle.remove()


def run(model: nn.Module, batch: Any) -> Any:
    """A forward pass without gradients: the model's output, or None where a hook stopped it."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return forward(model, batch)
    except StopForward:
        return None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        values = batch if isinstance(batch, Mapping) else {"inputs": batch}
        shapes = {key: tuple(value.shape) for key, value in values.items()}
        advice = " (give smaller batches)" if isinstance(error, torch.cuda.OutOfMemoryError) else ""
        raise SourceError(
            f"the model fails on a calibration batch of shape {shapes}{advice}: {error}"
        ) from error


def forward(model: nn.Module, batch: Any) -> Any:
    """Runs a model on a batch of any of the accepted forms."""
    positional, named = arguments_of(model, batch)
    return model(*positional, **named)


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Positional and keyword arguments to call a model with for a batch, on its device."""
    device = device_of(model)
    inputs = inputs_of(batch)
    if not isinstance(inputs, Mapping):
        return (inputs.to(device),), {}
    named = {key: value.to(device) for key, value in inputs.items()}
    return ((named,), {}) if _takes_a_dictionary(model, named) else ((), named)


def _takes_a_dictionary(model: nn.Module, named: Mapping[str, Tensor]) -> bool:
    """Whether a forward takes the whole dictionary: its first argument is required and not among the names."""
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if first is None or first.kind not in positional or first.default is not first.empty:
        return False
    return first.name not in named


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's tensors; a model that runs on codes may have only buffers.

    Weights on the meta device do not count: they are read onto the device of the others when they are used.
    """
    devices = (tensor.device for tensor in chain(model.parameters(), model.buffers()))
    first = next(devices, torch.device("cpu"))
    return first if first.type != "meta" else next((each for each in devices if each.type != "meta"), first)


def mask_of(batch: Any) -> Tensor | None:
    """Which tokens of a text batch are not padding, (samples, tokens); None if the batch has no such mask."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def inputs_of(batch: Any) -> Any:
    """A batch's inputs: a tensor or a dictionary of tensors, without the labels."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor | Mapping):
        batch = batch[0]
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping) and batch and all(isinstance(value, Tensor) for value in batch.values()):
        return batch
    raise SourceError(
        f"a calibration batch is a {type(batch).__name__}; expected a tensor, an (inputs, labels) pair, "
        "or a dictionary of tensors"
    )


def slice_batch(inputs: Any, start: int, stop: int) -> Any:
    """Some samples of a batch's inputs."""
    if isinstance(inputs, Tensor):
        return inputs[start:stop]
    return {key: value[start:stop] for key, value in inputs.items()}


def can_join(batch: Any, other: Any, most: int) -> bool:
    """Whether two batches are integers alike in shape, and no more than `most` of them together."""
    if type(batch) is not type(other):
        return False
    if isinstance(batch, Mapping):
        sizes = {len(value) if value.dim() else 0 for value in batch.values()}
        same = list(batch) == list(other) and len(sizes) == 1
        return same and all(can_join(batch[key], other[key], most) for key in batch)
    alike = batch.shape[1:] == other.shape[1:] and batch.dtype == other.dtype and batch.device == other.device
    return alike and not batch.is_floating_point() and batch.numel() + other.numel() <= most


def join_batches(batch: Any, other: Any) -> Any:
    """The inputs of two batches in one."""
    if isinstance(batch, Tensor):
        return torch.cat([batch, other])
    return {key: torch.cat([value, other[key]]) for key, value in batch.items()}


def merge_batches(batches: Iterable[Any], most: int) -> list[Any]:
    """The same inputs in batches of up to so many integers, where they are texts of one length."""
    merged: list[Any] = []
    for batch in batches:
        if merged and can_join(merged[-1], batch, most):
            merged[-1] = join_batches(merged[-1], batch)
        else:
            merged.append(batch)
    return merged


def batch_size(batch: Any) -> int:
    """Number of samples in a batch."""
    inputs = inputs_of(batch)
    first = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
    return len(first) if first.dim() else 0


def repeat_batch(batch: Any, times: int) -> Any:
    """A batch's inputs as often as asked, one copy after the other."""
    inputs = inputs_of(batch)
    if isinstance(inputs, Tensor):
        return torch.cat([inputs] * times)
    return {key: torch.cat([value] * times) for key, value in inputs.items()}
