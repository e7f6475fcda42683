"""Weight <-> tile matrix: the paper's reshape, as an exact inverse for every layer shape."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from factorpack.errors import PlanError


def out_first(weight: Tensor, transposed_groups: int = 0) -> Tensor:
    """Reads a weight in the order out, in, h, w.

    Only a transposed convolution is stored otherwise, as (in, out/groups, ...): it becomes
    (out, in/groups, ...), which is how a plain convolution of as many groups is stored.
    """
    if transposed_groups == 0:
        return weight
    if weight.dim() < 3 or weight.shape[0] % transposed_groups:
        raise PlanError(
            f"shape {tuple(weight.shape)} is not a transposed convolution of {transposed_groups} groups"
        )
    grouped = weight.reshape(transposed_groups, -1, *weight.shape[1:])  # (g, in/g, out/g, ...)
    return grouped.transpose(1, 2).flatten(0, 1)  # (out, in/g, ...)


def from_out_first(weight: Tensor, transposed_groups: int = 0) -> Tensor:
    """The inverse of `out_first`."""
    if transposed_groups == 0:
        return weight
    grouped = weight.reshape(transposed_groups, -1, *weight.shape[1:])  # (g, out/g, in/g, ...)
    return grouped.transpose(1, 2).flatten(0, 1)  # (in, out/g, ...)


def tile_count(numel: int, tile: int) -> int:
    return math.ceil(numel / tile)


def to_tiles(weight: Tensor, tile: int, transposed_groups: int = 0) -> Tensor:
    """Cuts a weight, read in the order out, in, h, w, into columns of `tile` numbers: (tile, n).

    The last column is filled up with zeros where `tile` does not divide the weight.

    >>> to_tiles(torch.arange(6.0).reshape(2, 3), tile=4)
    tensor([[0., 4.],
            [1., 5.],
            [2., 0.],
            [3., 0.]])
    """
    flat = out_first(weight, transposed_groups).reshape(-1)
    missing = tile_count(flat.numel(), tile) * tile - flat.numel()
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.reshape(-1, tile).T


def from_tiles(matrix: Tensor, shape: tuple[int, ...], transposed_groups: int = 0) -> Tensor:
    """The inverse of `to_tiles`: (tile, n) back to `shape`."""
    flat = matrix.T.reshape(-1)[: math.prod(shape)]
    return from_out_first(flat.reshape(out_first_shape(shape, transposed_groups)), transposed_groups)


def out_first_shape(shape: tuple[int, ...], transposed_groups: int = 0) -> tuple[int, ...]:
    """The shape `out_first` gives a weight of this shape."""
    if transposed_groups == 0:
        return shape
    return (shape[1] * transposed_groups, shape[0] // transposed_groups, *shape[2:])


def to_spatial(weight: Tensor, transposed_groups: int = 0) -> Tensor:
    """A weight (out, in, h, w) as the matrix (in*h, out*w) whose factors are one-dimensional filters.

    Of any other number of kernel dimensions the last one is w and all before it are h; without any, both
    are 1.
    """
    outputs, inputs, height, width = spatial_shape(tuple(weight.shape), transposed_groups)
    channels = out_first(weight, transposed_groups).reshape(outputs, inputs, height, width)
    return channels.permute(1, 2, 0, 3).reshape(inputs * height, outputs * width)


def from_spatial(matrix: Tensor, shape: tuple[int, ...], transposed_groups: int = 0) -> Tensor:
    """The inverse of `to_spatial`: (in*h, out*w) back to `shape`."""
    outputs, inputs, height, width = spatial_shape(shape, transposed_groups)
    channels = matrix.reshape(inputs, height, outputs, width).permute(2, 0, 1, 3)
    return from_out_first(channels.reshape(out_first_shape(shape, transposed_groups)), transposed_groups)


def spatial_shape(shape: tuple[int, ...], transposed_groups: int = 0) -> tuple[int, int, int, int]:
    """Out, in, h and w, as `to_spatial` reads them."""
    outputs, inputs, *kernel = out_first_shape(shape, transposed_groups)
    return outputs, inputs, math.prod(kernel[:-1]), kernel[-1] if kernel else 1
