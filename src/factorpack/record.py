"""`Encoded`: what every method produces, and what is counted, stored and decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from factorpack.tiles import Layout

MEAN_LEFT = 2.0**-10

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    )
}
"""Every dtype a checkpoint tensor may have, by the name the file uses."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One tensor of a model, in the form it is stored in.

    `parts` holds the arrays that `kinds.KINDS[kind]` needs. A part with an entry in `bits` is a matrix of
    signed integer codes of that width, [-2^(bits-1), 2^(bits-1) - 1], held as int8, or as int16 above 8
    bits. Any other part is held in its own dtype.

    >>> Encoded("keep", (2,), torch.float32, {"values": torch.tensor([1.0, 2.0])}).numel
    2
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, Tensor]
    bits: Mapping[str, int] = field(default_factory=dict)
    transposed_groups: int = 0
    """0: output channels come first. g > 0: a transposed convolution of g groups, (in, out/g, ...)."""
    extra_zeros: int = 0
    """Codes a threshold set to zero beyond those that rounding had already made zero."""
    note: str = ""
    """Why this tensor got this encoding, where a rule chose it and not the caller."""
    trellis: int = 0
    """States of the trellis that its codes are a path through; 0: any codes."""
    by_caller: bool = False
    """Whether the caller, and not a rule, chose this encoding. It is not stored in the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def layout(self) -> Layout:
        """The shape and the order of its dimensions."""
        return Layout(self.shape, self.transposed_groups)

    def to(self, device: torch.device | str) -> Encoded:
        """The same on a device; itself where it is there."""
        moved = {name: part.to(device) for name, part in self.parts.items()}
        there = all(moved[name] is part for name, part in self.parts.items())
        return self if there else replace(self, parts=moved)

    def noted(self, note: str) -> Encoded:
        """The same with a further reason in front; an empty one changes nothing."""
        if not note:
            return self
        return replace(self, note=f"{note}; {self.note}" if self.note else note)


@dataclass(frozen=True, slots=True, eq=False)
class LayerSample:
    """A layer's inputs, the outputs it should give, sample by sample, and how it computes."""

    inputs: Tensor
    """From the network as compressed so far, samples first."""
    outputs: Tensor
    """The original layer's, for the original network's inputs."""
    apply: Callable[[Tensor, Tensor], Tensor]
    """(weight, inputs) -> outputs."""

    def first(self, count: int) -> LayerSample:
        return replace(self, inputs=self.inputs[:count], outputs=self.outputs[:count])

    def split(self, share: float) -> tuple[LayerSample, LayerSample]:
        """All but the last `share` of the samples, and that share; at least one sample each."""
        held = min(max(round(share * len(self.inputs)), 1), len(self.inputs) - 1)
        last = replace(self, inputs=self.inputs[-held:], outputs=self.outputs[-held:])
        return self.first(len(self.inputs) - held), last


@dataclass(frozen=True, slots=True, eq=False)
class LayerMoments:
    """What second-order methods need to know about a layer's inputs u, per group; means are over positions."""

    second: Tensor
    """E[u u^T] in the network as compressed so far: (groups, K, K)."""
    mean: Tensor
    """E[u]: (groups, K)."""
    cross: Tensor | None
    """E[W u' u^T], where u' are the original network's inputs and W the original weight: (groups, out/groups, K);
    None where the inputs are the same."""
    original_mean: Tensor
    """E[u']: (groups, K)."""
    original_power: Tensor | None = None
    """E[(W u')^2], where W is the original weight: (groups, out/groups); None where the inputs are the same."""
    positions: int = 0
    """How many u the means are over; 0: unknown."""
    row_weights: Tensor | None = None
    """How much a squared error in each row of the weight counts, (out,); None: all the same."""
    restores_mean: bool = False
    """Whether the layer's mean output is restored once its weight is coded: then only what varies counts."""

    def about_mean(self, rows: Tensor) -> LayerMoments:
        """What counts in coding a weight (out, K): moments about the mean, where mean outputs are restored.

        MEAN_LEFT of the mean still counts: inputs that do not vary would leave nothing but errors of sums.
        """
        if not self.restores_mean:
            return self
        mean, cross = (1 - MEAN_LEFT) * self.mean, self.cross
        second = self.second - mean[:, :, None] * self.mean[:, None]
        if cross is not None:
            weight = rows.reshape(cross.shape).to(cross)
            outputs = weight @ self.original_mean.to(cross)[:, :, None]
            cross = cross - outputs * mean.to(cross)[:, None]
        return replace(self, second=second, cross=cross, restores_mean=False)

    def joined(self, other: LayerMoments) -> LayerMoments:
        """Those over the positions of both."""
        positions = self.positions + other.positions
        share = other.positions / positions

        def mix(mine: Tensor | None, its: Tensor | None) -> Tensor | None:
            return None if mine is None or its is None else torch.lerp(mine, its.to(mine), share)

        second, mean = torch.lerp(self.second, other.second, share), torch.lerp(self.mean, other.mean, share)
        return replace(
            self,
            second=second,
            mean=mean,
            cross=mix(self.cross, other.cross),
            original_mean=torch.lerp(self.original_mean, other.original_mean, share),
            original_power=mix(self.original_power, other.original_power),
            positions=positions,
        )


def weight_of(layer: str) -> str:
    """The name of a layer's weight; the layer may be the whole model, whose name is empty."""
    return f"{layer}.weight" if layer else "weight"


def layer_of(weight: str) -> str:
    """The inverse of `weight_of`."""
    return weight.removesuffix("weight").removesuffix(".")


def bias_of(weight: str) -> str:
    """The name of the bias beside a weight."""
    return f"{weight.removesuffix('weight')}bias"
