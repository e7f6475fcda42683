"""Second moments of a layer's inputs, accumulated batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from factorpack.record import LayerMoments
from factorpack.resident import loaded

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LARGE, BLOCKS = 1024, 8
"""Moments of at least LARGE inputs are computed in as many blocks, and mirrored."""


def has_moments(layer: nn.Module) -> bool:
    """Whether a layer's inputs can be unfolded: it is linear or a plain convolution."""
    return isinstance(layer, (nn.Linear, *CONVOLUTIONS))


def unfold_inputs(layer: nn.Module, inputs: Tensor) -> Tensor:
    """The vectors u with y = W u at each position: (groups, positions, in/groups * h * w).

    W is the weight flattened to (output channels, rest), group by group.
    """
    if isinstance(layer, nn.Linear):
        return inputs.reshape(1, -1, layer.in_features)
    assert isinstance(layer, CONVOLUTIONS)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = functional.pad(inputs, layer._reversed_padding_repeated_twice, mode)
    axes = len(layer.kernel_size)
    for axis, (size, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    ):
        windows = padded.unfold(2 + axis, dilation * (size - 1) + 1, stride)
        padded = windows[..., ::dilation]
    # (n, channels, *positions, *kernel) -> (groups, n * positions, channels/groups * kernel)
    samples, channels = padded.shape[:2]
    split = padded.reshape(samples, layer.groups, channels // layer.groups, *padded.shape[2:])
    spots, kernel = range(3, 3 + axes), range(3 + axes, 3 + 2 * axes)
    ordered = split.permute(1, 0, *spots, 2, *kernel)
    return ordered.reshape(layer.groups, -1, layer.weight[0].numel())


def unfolding(layer: nn.Module) -> tuple[object, ...]:
    """What `unfold_inputs` depends on: layers that agree in it and in their input have the same moments."""
    if isinstance(layer, nn.Linear):
        return ("linear", layer.in_features)
    assert isinstance(layer, CONVOLUTIONS)
    shape = (layer.in_channels, layer.groups, layer.kernel_size, layer.stride, layer.dilation)
    return (*shape, layer.padding, layer.padding_mode)


class MomentAccumulator:
    """Running sums over batches for one layer, and for others with the same inputs and the same `unfolding`."""

    def __init__(self, layer: nn.Module, max_rows: int, others: Sequence[nn.Module] = ()) -> None:
        self._layers = (layer, *others)
        self._max_rows = max_rows
        outputs, size = sum(_shape(each)[0] for each in self._layers), math.prod(_shape(layer)[1:])
        # E[W u' u^T] as it is, or as W E[u' u^T], whichever is less work.
        self._by_output = outputs < size
        self._sums: list[Tensor] = []
        self._rows = 0

    def add(self, inputs: Tensor, of_original: Tensor | None = None) -> None:
        """Adds the positions of one batch: all of them, or evenly spaced ones if there are many.

        `of_original` are the layer's inputs in the uncompressed network.
        """
        seen = self._positions(inputs)
        parts = [gram(seen), seen.sum(1)]
        if of_original is not None:
            wanted = self._positions(of_original)
            outputs = [wanted @ _rows_of_weight(each, len(wanted)).transpose(1, 2) for each in self._layers]
            parts += [wanted.sum(1), *(each.square().sum(1) for each in outputs)]
            parts += [each.transpose(1, 2) @ seen for each in (outputs if self._by_output else [wanted])]
        parts = [part.double() if part.dim() == 2 else part for part in parts]
        self._sums = parts if not self._sums else [a.add_(b) for a, b in zip(self._sums, parts, strict=True)]
        self._rows += seen.shape[1]

    def _positions(self, inputs: Tensor) -> Tensor:
        rows = unfold_inputs(self._layers[0], inputs.float())
        count = rows.shape[1]
        if count <= self._max_rows:
            return rows
        # Multiples of the golden ratio are evenly spaced and never align with an image's width.
        golden = torch.arange(self._max_rows, dtype=torch.float64, device=rows.device) * 0.6180339887498949
        return rows[:, ((golden % 1.0) * count).long()]

    def result(self) -> LayerMoments:
        return self.results()[0]

    def results(self) -> list[LayerMoments]:
        """The moments of the layer and of the others; what depends on their inputs alone is the same tensor."""
        second, total, *original = (part / self._rows for part in self._sums)
        mean, count = total.float(), len(self._layers)
        if not original:
            return [LayerMoments(second, mean, None, mean)] * count
        original_mean, powers, cross = original[0].float(), original[1 : 1 + count], original[1 + count :]
        if not self._by_output:
            cross = [_rows_of_weight(each, len(second)) @ cross[0] for each in self._layers]
        return [
            LayerMoments(second, mean, of_outputs, original_mean, power.float())
            for of_outputs, power in zip(cross, powers, strict=True)
        ]


def gram(rows: Tensor) -> Tensor:
    """The sums u u^T of (groups, positions, K): of a large one only the blocks from the diagonal on are computed."""
    size = rows.shape[2]
    if size < LARGE:
        return rows.transpose(1, 2) @ rows
    found = rows.new_empty(len(rows), size, size)
    width = -(-size // BLOCKS)
    for start in range(0, size, width):
        block = rows[:, :, start : start + width].transpose(1, 2) @ rows[:, :, start:]
        found[:, start : start + width, start:] = block
        found[:, start:, start : start + width] = block.transpose(1, 2)
    return found


def _rows_of_weight(layer: nn.Module, groups: int) -> Tensor:
    """A layer's weight: (groups, out/groups, K)."""
    weight = loaded(layer).weight
    assert isinstance(weight, Tensor)
    return weight.detach().float().reshape(groups, -1, weight[0].numel())


def _shape(layer: nn.Module) -> torch.Size:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.shape
