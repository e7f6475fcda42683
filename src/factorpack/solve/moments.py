"""Second moments of a layer's inputs, accumulated batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from factorpack.passes.resident import loaded
from factorpack.record import LayerMoments
from factorpack.solve.evenly import spread_evenly

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = nn.modules.batchnorm._BatchNorm
LARGE, BLOCKS = 1024, 8
"""Moments of at least LARGE inputs are computed in as many blocks, and mirrored."""


def has_moments(layer: nn.Module) -> bool:
    """Whether a layer's inputs can be unfolded: it is linear or a plain convolution."""
    return isinstance(layer, (nn.Linear, *CONVOLUTIONS))


def unfold_inputs(layer: nn.Module, inputs: Tensor) -> Tensor:
    """The vectors u with y = W u at each position: (groups, positions, in/groups * h * w).

    W is the weight flattened to (output channels, rest), group by group.
    """
    order = _to_weight_order(layer, inputs.device)
    rows = positions(layer, inputs)
    return rows if order is None else rows[:, :, order]


def positions(layer: nn.Module, inputs: Tensor, most: int | None = None) -> Tensor:
    """The same with channels last within a group, which is ten times as fast: (groups, positions, h * w * in/groups).

    Of more than `most` positions, as many evenly spaced ones are taken.
    """
    if isinstance(layer, nn.Linear):
        windows = inputs.reshape(-1, layer.in_features)
        spots, groups = 1, 1
    else:
        assert isinstance(layer, CONVOLUTIONS)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = functional.pad(inputs, layer._reversed_padding_repeated_twice, mode)
        windows = padded.movedim(1, -1).contiguous()
        for axis, (size, stride, dilation) in enumerate(
            zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        ):
            windows = windows.unfold(1 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        # (n, *positions, channels, *kernel) -> (n, *positions, *kernel, channels): nothing is copied yet
        spots, groups = 1 + len(layer.kernel_size), layer.groups
        windows = windows.movedim(spots, -1)
    shape = windows.shape[:spots]
    count = math.prod(shape)
    if most is not None and count > most:
        windows = windows[_unravel(spread_evenly(count, most, inputs.device), shape)]
        spots = 1
    if groups == 1:
        return windows.reshape(1, -1, math.prod(windows.shape[spots:]))
    split: Tensor = windows.unflatten(-1, (groups, -1)).movedim(-2, 0)
    return split.reshape(groups, -1, math.prod(split.shape[1 + spots :]))


def _unravel(places: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """As `torch.unravel_index`, whose first call imports sympy: 2.7 s."""
    axes = []
    for size in reversed(shape):
        axes.append(places % size)
        places = places // size
    return tuple(reversed(axes))


def _to_weight_order(layer: nn.Module, device: torch.device) -> Tensor | None:
    """Where each of a filter's K inputs is found with channels last; None where the order is the same."""
    if isinstance(layer, nn.Linear):
        return None
    assert isinstance(layer, CONVOLUTIONS)
    kernel, channels = math.prod(layer.kernel_size), layer.in_channels // layer.groups
    if kernel == 1 or channels == 1:
        return None
    return torch.arange(kernel * channels, device=device).reshape(kernel, channels).T.flatten()


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
        seen = positions(self._layers[0], inputs.float(), self._max_rows)
        parts = [gram(seen), seen.sum(1)]
        if of_original is not None:
            wanted = positions(self._layers[0], of_original.float(), self._max_rows)
            outputs = [wanted @ self._by_group(each).transpose(1, 2) for each in self._layers]
            parts += [wanted.sum(1), *(each.square().sum(1) for each in outputs)]
            parts += [each.transpose(1, 2) @ seen for each in (outputs if self._by_output else [wanted])]
        parts = [part.double() if part.dim() == 2 else part for part in parts]
        self._sums = parts if not self._sums else [a.add_(b) for a, b in zip(self._sums, parts, strict=True)]
        self._rows += seen.shape[1]

    def result(self) -> LayerMoments:
        return self.results()[0]

    def results(self) -> list[LayerMoments]:
        """The moments of the layer and of the others; what depends on their inputs alone is the same tensor."""
        second, total, *original = (part / self._rows for part in self._sums)
        count = len(self._layers)
        order = _to_weight_order(self._layers[0], second.device)
        mean = _ordered(total, order).float()
        if not original:
            alone = LayerMoments(_ordered(second, order, 1), mean, None, mean, positions=self._rows)
            return [alone] * count
        original_mean, powers, cross = original[0], original[1 : 1 + count], original[1 + count :]
        if not self._by_output:
            cross = [self._by_group(each) @ cross[0] for each in self._layers]
        second, original_mean = _ordered(second, order, 1), _ordered(original_mean, order).float()
        return [
            LayerMoments(second, mean, _ordered(of_outputs, order), original_mean, power.float(), self._rows)
            for of_outputs, power in zip(cross, powers, strict=True)
        ]

    def _by_group(self, layer: nn.Module) -> Tensor:
        """A layer's weight with channels last: (groups, out/groups, K)."""
        filters = _filters(layer)
        return filters.reshape(layer.groups if isinstance(layer, CONVOLUTIONS) else 1, -1, filters.shape[1])


def _filters(layer: nn.Module) -> Tensor:
    """A layer's weight with channels last: (out, K)."""
    weight = loaded(layer).weight
    assert isinstance(weight, Tensor)
    return weight.detach().float().movedim(1, -1).flatten(1)


def _ordered(values: Tensor, order: Tensor | None, also: int | None = None) -> Tensor:
    """Inputs, in the last dimension and perhaps another, in the order of the weight."""
    if order is None:
        return values
    values = values[..., order]
    return values if also is None else values.index_select(also, order)


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


def _shape(layer: nn.Module) -> torch.Size:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.shape
