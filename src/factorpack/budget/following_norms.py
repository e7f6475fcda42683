"""Mean outputs restored without data: a batch norm's running mean says what mean inputs its layer had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factorpack.checkpoints.weight_names import natural_key
from factorpack.record import bias_of
from factorpack.source import Source

RIDGE = 0.05
"""Added to the diagonal of the normal equations, as a share of its mean."""
LEAST_EXPLAINED = 0.5
"""Mean inputs have to explain this share of the mean outputs' energy. Else the norm is another layer's, or the
layer has groups, which a checkpoint does not tell."""
_MEAN = "running_mean"


@dataclass(frozen=True, slots=True)
class MeanOutput:
    """A layer's mean output as its norm expects it, and the layer's mean inputs."""

    running_mean: Tensor
    mean_inputs: Tensor
    """Per input channel; a depthwise layer has one per output channel."""
    before: Tensor
    """The mean output of the original weight, by `mean_inputs`."""

    def with_weight(self, weight: Tensor) -> Tensor:
        """The running mean with which the norm's output has the same mean although the weight changed."""
        change = _mean_output(_kernel_sums(weight), self.mean_inputs) - self.before
        return (self.running_mean.double() + change.to(self.running_mean.device)).to(self.running_mean.dtype)


def explain_mean(weight: Tensor, bias: Tensor | None, running_mean: Tensor) -> MeanOutput | None:
    """Finds the mean inputs that explain a norm's running mean by least squares; None where nothing explains it."""
    sums, wanted = _kernel_sums(weight), running_mean.double().to(weight.device)
    if bias is not None:
        wanted = wanted - bias.to(wanted)
    if sums.shape[1] == 1:
        power = sums.square().squeeze(1)
        inputs = wanted * sums.squeeze(1) / (power + RIDGE * power.mean()).clamp_min(1e-300)
    else:
        gram = sums.T @ sums
        gram.diagonal().add_((RIDGE * gram.diagonal().mean()).clamp_min(1e-300))
        inputs = torch.linalg.solve(gram, sums.T @ wanted)
    before = _mean_output(sums, inputs)
    left = (wanted - before).square().sum()
    if not left <= (1 - LEAST_EXPLAINED) * wanted.square().sum():
        return None
    return MeanOutput(running_mean, inputs, before)


def explain_mean_of(source: Source, weight: str, running_mean: str) -> MeanOutput | None:
    """`explain_mean` of tensors of a checkpoint, by their names."""
    bias = source.entries.get(bias_of(weight))
    tensors = source.entries[weight].load(), source.entries[running_mean].load()
    return explain_mean(tensors[0], None if bias is None else bias.load(), tensors[1])


def _kernel_sums(weight: Tensor) -> Tensor:
    """What a constant input channel adds to each output: (out, in)."""
    return weight.double().flatten(2).sum(2) if weight.ndim > 2 else weight.double()


def _mean_output(sums: Tensor, inputs: Tensor) -> Tensor:
    return sums.squeeze(1) * inputs if sums.shape[1] == 1 else sums @ inputs


def running_means_after(source: Source, weights: Sequence[str]) -> dict[str, str]:
    """Weights and the running mean of the batch norm behind each, where names and lengths leave no doubt.

    A state dict has layers in the order they were made; a sorted file has only their names.
    """
    means: dict[tuple[object, ...], list[str]] = {}
    for name, entry in source.entries.items():
        if name.endswith(_MEAN) and len(entry.shape) == 1:
            means.setdefault((_parent(name), entry.shape), []).append(name)
    if not means:
        return {}
    candidates = {
        name: means.get((_parent(name), source.entries[name].shape[:1]), [])
        for name in weights
        if not source.transposed_groups.get(name)
    }
    names = list(source.entries)
    is_sorted = names in (sorted(names), sorted(names, key=natural_key))
    choose = _by_name if is_sorted else _by_place(names, weights)
    found = {name: choose(name, near) for name, near in candidates.items()}
    used = Counter(found.values())
    return {name: mean for name, mean in found.items() if mean is not None and used[mean] == 1}


def _by_place(names: Sequence[str], weights: Sequence[str]) -> Callable[[str, Sequence[str]], str | None]:
    """A norm follows a weight where no other weight is in between."""
    last, known = "", set(weights)
    weight_before = {name: (last := name if name in known else last) for name in names}
    return lambda name, means: _only([mean for mean in means if weight_before[mean] == name])


def _by_name(name: str, means: Sequence[str]) -> str | None:
    """Norm 1 of a sequence follows layer 0; `bn1` follows `conv1`."""
    layer = _module(name)
    if layer.isdigit():
        return _only([mean for mean in means if _module(mean) == str(int(layer) + 1)])
    same_number = [mean for mean in means if "bn" in _module(mean) and _number(mean) == _number(name)]
    return _only(means) or _only(same_number)


def _only(means: Sequence[str]) -> str | None:
    return means[0] if len(means) == 1 else None


def _parent(name: str) -> str:
    """The module that holds a tensor's own."""
    return ".".join(name.split(".")[:-2])


def _module(name: str) -> str:
    return name.split(".")[-2] if "." in name else ""


def _number(name: str) -> str:
    """The digits that a module's name ends with."""
    return _module(name)[len(_module(name).rstrip("0123456789")) :]
