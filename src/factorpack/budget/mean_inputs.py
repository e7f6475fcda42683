"""Mean inputs of layers without data: a batch norm in front says what it gives, the norm behind checks it.

A norm's outputs are about Gaussian, with its bias as mean and its weight as standard deviation. What an activation
makes of them has a known mean. Which norm and which activation are in front of a layer is not in a checkpoint, so
some are tried: the best is what explains the running mean behind the layer best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from factorpack.budget.following_norms import (
    MeanOutput,
    explain_mean,
    is_sorted,
    keep_mean,
    mean_before_bias,
    running_means_after,
    share_left,
)
from factorpack.checkpoints.weight_names import natural_key
from factorpack.record import bias_of
from factorpack.source import Source

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "relu": functional.relu,
    "silu": functional.silu,
}
"""Others are much like these: a ReLU6 cuts few values off, and a hard swish is a SiLU of straight lines."""
NEAREST = 4
"""Norms that are tried, of those that have as many channels as a layer has inputs."""
_MEAN = ".running_mean"


def explain_means(source: Source, weights: Sequence[str]) -> dict[str, tuple[str, MeanOutput]]:
    """Weights, the tensor that is corrected where each changes, and what explains their mean outputs.

    That tensor is the running mean of the norm behind, or the bias of a last layer that has a norm in front.
    """
    norms = _Norms(source, weights)
    activations: Counter[str] = Counter()
    found = {}
    for name, mean in running_means_after(source, weights).items():
        bias = source.entries.get(bias_of(name))
        weight, running_mean = source.entries[name].load(), source.entries[mean].load()
        own = None if bias is None else bias.load()
        activation, expected = _best(
            norms.expected(name), weight, mean_before_bias(weight, own, running_mean)
        )
        explained = explain_mean(weight, own, running_mean, expected)
        if explained is not None:
            found[name] = (mean, explained)
            activations[activation] += 1
    usual = [each for each, _ in activations.most_common() if each != "none"]
    for name in weights if usual else ():
        norm = norms.directly_before(name) if _is_last(source, name, found) else None
        if norm is not None:
            bias, inputs = source.entries[bias_of(name)], norms.mean_after(usual[0], norm)
            found[name] = (bias_of(name), keep_mean(source.entries[name].load(), bias.load(), inputs))
    return found


def _best(
    tried: Mapping[tuple[int, str], Tensor], weight: Tensor, wanted: Tensor
) -> tuple[str, Tensor | None]:
    """The activation and the mean inputs that explain a mean output best; none where all are worse than zeros."""
    left = {way: share_left(weight, wanted, inputs.to(wanted)) for way, inputs in tried.items()}
    best = min(left, key=lambda way: left[way], default=None)
    if best is None or not left[best] < 1:
        return "none", None
    return best[1], tried[best].to(wanted)


def _is_last(source: Source, name: str, explained: Mapping[str, object]) -> bool:
    """Whether a weight is that of a classifier: a matrix with a bias, and no norm behind it."""
    return name not in explained and len(source.entries[name].shape) == 2 and bias_of(name) in source.entries


def mean_after(activation: str, weight: Tensor, bias: Tensor) -> Tensor:
    """The mean of an activation's outputs behind a batch norm, by the trapezoidal rule over six deviations."""
    points = torch.linspace(-6, 6, 241, dtype=torch.float64, device=weight.device)
    density = torch.exp(-points.square() / 2)
    values: Tensor = ACTIVATIONS[activation](weight.double()[:, None] * points + bias.double()[:, None])
    return values @ (density / density.sum())


class _Norms:
    """The batch norms of a checkpoint in the order of its layers, as far as that is known."""

    def __init__(self, source: Source, weights: Sequence[str]) -> None:
        self._source, self._weights = source, set(weights)
        names = list(source.entries)
        self._are_sorted = is_sorted(names)
        self._order = sorted(names, key=natural_key) if self._are_sorted else names
        self._place = {name: place for place, name in enumerate(self._order)}
        self._norms = [
            name.removesuffix(_MEAN)
            for name in self._order
            if name.endswith(_MEAN)
            and all(f"{name.removesuffix(_MEAN)}.{part}" in source.entries for part in ("weight", "bias"))
        ]

    def expected(self, name: str) -> dict[tuple[int, str], Tensor]:
        """Mean inputs a layer may have: by how many norms before it, and by activation.

        Blocks with a shortcut add their outputs up, and so do their mean outputs: sums have negative numbers.
        """
        near = [norm for norm in self._fitting(name) if self._place[norm + _MEAN] < self._place[name]][::-1]
        found = {
            (place, activation): mean_after(activation, *self._parts(norm))
            for place, norm in enumerate(near[:NEAREST])
            for activation in ACTIVATIONS
        }
        sums = accumulate(self._parts(norm)[1].double() for norm in near)
        return found | {(-place, "none"): total for place, total in enumerate(sums) if place}

    def directly_before(self, name: str) -> str | None:
        """The norm that no other weight separates from this one; in a sorted file the last one that fits."""
        near = [
            norm
            for norm in self._fitting(name)
            if self._are_sorted or self._place[norm + _MEAN] < self._place[name]
        ]
        if not near or self._are_sorted:
            return near[-1] if near else None
        between = self._order[self._place[near[-1] + _MEAN] : self._place[name]]
        return None if self._weights.intersection(between) else near[-1]

    def mean_after(self, activation: str, norm: str) -> Tensor:
        return mean_after(activation, *self._parts(norm))

    def _fitting(self, name: str) -> list[str]:
        """Norms with as many channels as a layer has inputs."""
        shape = self._source.entries[name].shape
        inputs = shape[0] if shape[1] == 1 else shape[1]
        return [norm for norm in self._norms if self._source.entries[norm + _MEAN].shape == (inputs,)]

    def _parts(self, norm: str) -> tuple[Tensor, Tensor]:
        return self._source.entries[f"{norm}.weight"].load(), self._source.entries[f"{norm}.bias"].load()
