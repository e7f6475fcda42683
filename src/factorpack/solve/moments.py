"""Second moments of a layer's inputs, accumulated batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from factorpack.record import LayerMoments

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def has_moments(layer: nn.Module) -> bool:
    """Whether a layer's inputs can be unfold_inputs: it is linear or a plain convolution."""
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
        self._layer, self._others = layer, others
        self._max_rows = max_rows
        self._sums: list[Tensor] = []
        self._rows = 0

    def add(self, inputs: Tensor, of_original: Tensor | None = None) -> None:
        """Adds the positions of one batch: all of them, or evenly spaced ones if there are many.

        `of_original` are the layer's inputs in the uncompressed network.
        """
        seen = self._positions(inputs)
        wanted = seen if of_original is None else self._positions(of_original)
        parts = [seen.transpose(1, 2) @ seen, seen.sum(1)]
        if of_original is not None:
            parts += [wanted.transpose(1, 2) @ seen, wanted.sum(1)]
            parts += [_power(layer, wanted) for layer in (self._layer, *self._others)]
        parts = [part.double() if part.dim() == 2 else part for part in parts]
        self._sums = parts if not self._sums else [a.add_(b) for a, b in zip(self._sums, parts, strict=True)]
        self._rows += seen.shape[1]

    def _positions(self, inputs: Tensor) -> Tensor:
        rows = unfold_inputs(self._layer, inputs.float())
        count = rows.shape[1]
        if count <= self._max_rows:
            return rows
        # Multiples of the golden ratio are evenly spaced and never align with an image's width.
        golden = torch.arange(self._max_rows, dtype=torch.float64, device=rows.device) * 0.6180339887498949
        return rows[:, ((golden % 1.0) * count).long()]

    def result(self) -> LayerMoments:
        return self.results()[0]

    def results(self) -> list[LayerMoments]:
        """The moments of the layer and of the others; they share their tensors."""
        second, total, *original = (part / self._rows for part in self._sums)
        cross, original_mean, *powers = original if original else (None, total)
        mean, original_mean = total.float(), original_mean.float()
        found = [power.float() for power in powers] if powers else [None] * (1 + len(self._others))
        return [LayerMoments(second, mean, cross, original_mean, power) for power in found]


def _power(layer: nn.Module, rows: Tensor) -> Tensor:
    """Squared outputs of a layer without bias, summed over rows: (groups, out/groups)."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    split = weight.detach().float().reshape(len(rows), -1, rows.shape[2])
    return (rows @ split.transpose(1, 2)).square().sum(1)
