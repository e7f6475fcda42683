"""Weight <-> tile matrix: the paper's reshape and its exact inverse, for every layer shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from factorpack.errors import PlanError


@dataclass(frozen=True, slots=True)
class Layout:
    """A weight's shape and the order of its dimensions; methods read them as (out, in, h, w).

    A transposed convolution is stored as (in, out/groups, ...). Every other weight has its output channels
    first.

    >>> Layout((6, 2, 3, 3), transposed_groups=2).out_first_shape
    (4, 3, 3, 3)
    """

    shape: tuple[int, ...]
    transposed_groups: int = 0
    """0: output channels come first. g > 0: a transposed convolution of g groups."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def out_first_shape(self) -> tuple[int, ...]:
        """The shape that `out_first` gives the weight."""
        if self.transposed_groups == 0:
            return self.shape
        groups = self.transposed_groups
        return (self.shape[1] * groups, self.shape[0] // groups, *self.shape[2:])

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return self.out_first_shape[0]

    @property
    def spatial_shape(self) -> tuple[int, int, int, int]:
        """Out, in, h and w, as `to_spatial` reads them.

        The last kernel dimension is w and all before it together are h. Without any, both are 1.
        """
        outputs, inputs, *kernel = self.out_first_shape
        return outputs, inputs, math.prod(kernel[:-1]), kernel[-1] if kernel else 1

    def tile_count(self, tile: int) -> int:
        """Number of tiles of `tile` elements; the last may be partly filled."""
        return tile_count(self.numel, tile)

    def out_first(self, weight: Tensor) -> Tensor:
        """The weight in the order out, in, h, w.

        A transposed convolution becomes (out, in/groups, ...), as a plain convolution with the same number
        of groups is stored.
        """
        groups = self.transposed_groups
        if groups == 0:
            return weight
        if weight.dim() < 3 or weight.shape[0] % groups:
            raise PlanError(f"shape {tuple(weight.shape)} is not a transposed convolution of {groups} groups")
        return _swap_grouped(weight, groups)  # (out, in/g, ...)

    def from_out_first(self, weight: Tensor) -> Tensor:
        """The inverse of `out_first`."""
        groups = self.transposed_groups
        return weight if groups == 0 else _swap_grouped(weight, groups)  # (in, out/g, ...)

    def to_tiles(self, weight: Tensor, tile: int) -> Tensor:
        """Cuts a weight, read in the order out, in, h, w, into columns of `tile` elements: (tile, n).

        The last column is padded with zeros where `tile` does not divide the weight.

        >>> Layout((2, 3)).to_tiles(torch.arange(6.0).reshape(2, 3), tile=4)
        tensor([[0., 4.],
                [1., 5.],
                [2., 0.],
                [3., 0.]])
        """
        flat = self.out_first(weight).reshape(-1)
        missing = tile_count(flat.numel(), tile) * tile - flat.numel()
        if missing:
            flat = torch.cat([flat, flat.new_zeros(missing)])
        return flat.reshape(-1, tile).T

    def from_tiles(self, matrix: Tensor) -> Tensor:
        """The inverse of `to_tiles`: (tile, n) back to the weight."""
        flat = matrix.T.reshape(-1)[: self.numel]
        return self.from_out_first(flat.reshape(self.out_first_shape))

    def to_spatial(self, weight: Tensor) -> Tensor:
        """A weight as the matrix (in*h, out*w), whose factors are one-dimensional filters."""
        outputs, inputs, height, width = self.spatial_shape
        channels = self.out_first(weight).reshape(outputs, inputs, height, width)
        return channels.permute(1, 2, 0, 3).reshape(inputs * height, outputs * width)

    def from_spatial(self, matrix: Tensor) -> Tensor:
        """The inverse of `to_spatial`: (in*h, out*w) back to the weight."""
        outputs, inputs, height, width = self.spatial_shape
        channels = matrix.reshape(inputs, height, outputs, width).permute(2, 0, 1, 3)
        return self.from_out_first(channels.reshape(self.out_first_shape))


def tile_count(numel: int, tile: int) -> int:
    return math.ceil(numel / tile)


def _swap_grouped(weight: Tensor, groups: int) -> Tensor:
    """Swaps the two channel dimensions inside each group: (g*a, b, ...) -> (g*b, a, ...)."""
    grouped = weight.reshape(groups, -1, *weight.shape[1:])  # (g, a, b, ...)
    return grouped.transpose(1, 2).flatten(0, 1)
