"""Mean outputs restored without data: a batch norm's running mean says what mean inputs its layer had.

`mean_inputs` knows more of them, where a norm is in front of the layer too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from factorpack.checkpoints.weight_names import natural_key
from factorpack.source import Source

RIDGE = 0.05
"""Added to the diagonal of the normal equations, as a share of its mean."""
LEAST_EXPLAINED = 0.5
"""Mean inputs have to explain this share of the mean outputs' energy. Else the norm is another layer's, or the
layer has groups, which a checkpoint does not tell."""
_MEAN = "running_mean"


@dataclass(frozen=True, slots=True)
class MeanOutput:
    """A layer's mean output as what follows expects it, and the layer's mean inputs."""

    stored: Tensor
    """The running mean of the norm behind the layer, or the layer's bias where there is none."""
    mean_inputs: Tensor
    """Per input channel; a depthwise layer has one per output channel."""
    before: Tensor
    """The mean output of the original weight, by `mean_inputs`."""
    is_bias: bool = False

    def with_weight(self, weight: Tensor) -> Tensor:
        """What to store so that the mean behind norm or bias is the same although the weight changed."""
        change = (_mean_output(_kernel_sums(weight), self.mean_inputs) - self.before).to(self.stored.device)
        return (self.stored.double() + (-change if self.is_bias else change)).to(self.stored.dtype)


def explain_mean(
    weight: Tensor, bias: Tensor | None, running_mean: Tensor, expected: Tensor | None = None
) -> MeanOutput | None:
    """Finds mean inputs that explain a norm's running mean; None where nothing explains it.

    They are `expected`, or zero, and the least change to it, by least squares.
    """
    sums, wanted = _kernel_sums(weight), mean_before_bias(weight, bias, running_mean)
    start = wanted.new_zeros(weight.shape[0 if sums.shape[1] == 1 else 1]) if expected is None else expected
    left = wanted - _mean_output(sums, start)
    if sums.shape[1] == 1:
        power = sums.square().squeeze(1)
        change = left * sums.squeeze(1) / (power + RIDGE * power.mean()).clamp_min(1e-300)
    else:
        gram = sums.T @ sums
        gram.diagonal().add_((RIDGE * gram.diagonal().mean()).clamp_min(1e-300))
        change = torch.linalg.solve(gram, sums.T @ left)
    before = _mean_output(sums, start + change)
    if not (wanted - before).square().sum() <= (1 - LEAST_EXPLAINED) * wanted.square().sum():
        return None
    return MeanOutput(running_mean, start + change, before)


def mean_before_bias(weight: Tensor, bias: Tensor | None, running_mean: Tensor) -> Tensor:
    """What the weight alone adds to a running mean."""
    wanted = running_mean.double().to(weight.device)
    return wanted if bias is None else wanted - bias.to(wanted)


def share_left(weight: Tensor, wanted: Tensor, expected: Tensor) -> float:
    """The share of a mean output's energy that expected mean inputs leave unexplained."""
    left = wanted - _mean_output(_kernel_sums(weight), expected)
    return float(left.square().sum() / wanted.square().sum().clamp_min(1e-300))


def keep_mean(weight: Tensor, bias: Tensor, mean_inputs: Tensor) -> MeanOutput:
    """The mean output of a layer without a norm, to be kept by its bias."""
    return MeanOutput(bias, mean_inputs, _mean_output(_kernel_sums(weight), mean_inputs), is_bias=True)


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
    choose = _by_name if is_sorted(names) else _by_place(names, weights)
    found = {name: choose(name, near) for name, near in candidates.items()}
    used = Counter(found.values())
    return {name: mean for name, mean in found.items() if mean is not None and used[mean] == 1}


def is_sorted(names: Sequence[str]) -> bool:
    """Whether names are in the order of a file, not in that of the layers."""
    return list(names) in (sorted(names), sorted(names, key=natural_key))


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
