"""Layers computed as Z (C^T x): the weight is never built.

A tile inside one output filter, made of complete kernels of m input channels, meets only the inputs of those
channels. Their products with the k columns of C are the same for all filters, and a filter is a sum of these,
weighted by its row of Z: a convolution with C for every m channels, then one of 1x1 filters with Z. For a
Linear layer, and images of one pixel, both are matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from factorpack.kinds import KINDS
from factorpack.quantize.uniform import from_codes
from factorpack.record import Encoded
from factorpack.runtime.packed_layers import (
    PackedConv1d,
    PackedConv2d,
    PackedConv3d,
    PackedLayer,
    PackedLinear,
    compute_dtype,
)

_CONVOLVE: dict[int, Callable[..., Tensor]] = {
    1: functional.conv1d,
    2: functional.conv2d,
    3: functional.conv3d,
}


def why_not_factored(layer: nn.Module, encoded: Encoded) -> str:
    """Why a layer cannot be computed from its factors; empty where it can."""
    if not KINDS[encoded.kind].computes_factored:
        return f"its weight is stored as {encoded.kind!r}, only factors can be computed with"
    if type(layer) not in FACTORED or encoded.layout.transposed_groups:
        return f"layers of class {type(layer).__name__} are not computed from factors"
    if encoded.dtype == torch.float16:
        return "its weight is FP16, which holds neither the folded scales nor sums of codes"
    tile, kernel = len(encoded.parts["codebook"]), math.prod(encoded.shape[2:])
    if math.prod(encoded.shape[1:]) % tile or tile % kernel:
        return f"a tile of {tile} does not divide a filter of {encoded.shape[1]} kernels of {kernel}"
    return ""


class FactoredLayer(PackedLayer):
    """Computes from the factors; its `weight` can still be read."""

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """C with all scales that can be folded into it, (d, k); Z, (n, k), integers then; mu, (d, 1)."""
        packed = self.packed
        with torch.autocast(packed.like.device.type, enabled=False):
            codebook = from_codes(packed.part("codebook"), packed.part("codebook_scale"))
            latent, scale = packed.part("latent").T.to(dtype), packed.part("latent_scale")
            if scale.shape[1] == 1:
                codebook = codebook * scale.T
            else:
                latent = latent * scale.T.to(dtype)
            mean = packed.part("mean").to(dtype) if "mean" in packed.part_shapes else None
            return codebook.to(dtype), latent, mean


class FactoredLinear(FactoredLayer, PackedLinear):
    def prepare(self) -> None:
        self.packed.fold()

    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(input)
        if dtype == torch.float16:
            return super().forward(input)
        packed, values = self.packed, input.to(dtype)
        tiles = values.unflatten(-1, (-1, packed.part_shapes["codebook"][0]))  # (..., K/d, d)
        if packed.folded is not None:
            mixed = (tiles @ packed.folded.to(dtype)).flatten(-2)
            outputs = self.multiplied(mixed, "latent", None)
            mean = packed.folded_mean
            return outputs if mean is None else outputs + values @ mean.to(dtype)
        codebook, latent, mean = self.factors(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        outputs = functional.linear(
            (tiles @ codebook).flatten(-2), latent.reshape(self.out_features, -1), bias
        )
        return outputs if mean is None else outputs + (tiles @ mean).sum(-2)


class FactoredConv(FactoredLayer, nn.modules.conv._ConvNd):
    def forward(self, input: Tensor) -> Tensor:
        dtype = compute_dtype(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        if dtype == torch.float16:
            return self._conv_forward(input, self.weight, self.bias)
        codebook, latent, mean = self.factors(dtype)
        dimensions = len(self.kernel_size)
        channels = len(codebook) // math.prod(self.kernel_size)  # m
        blocks, still = self.in_channels // channels, [1] * dimensions
        mixed = self._convolve_like(
            input.to(dtype), _kernels(codebook, channels, self.kernel_size).repeat(blocks, 1, *still), blocks
        )  # (..., blocks k, h', w')
        by_filter = latent.reshape(self.out_channels, -1, *still)
        outputs = _CONVOLVE[dimensions](mixed, by_filter, bias, groups=self.groups)
        if mean is None:
            return outputs
        average = _kernels(mean, channels, self.kernel_size)
        average = average.repeat(self.groups, blocks // self.groups, *still)
        shared = self._convolve_like(input.to(dtype), average, self.groups)  # (..., groups, h', w')
        return outputs + shared.repeat_interleave(self.out_channels // self.groups, -dimensions - 1)

    def _convolve_like(self, input: Tensor, kernels: Tensor, groups: int) -> Tensor:
        """The layer's own stride, padding and dilation, with other kernels and groups."""
        padding: str | tuple[int, ...] | int = self.padding
        if self.padding_mode != "zeros":
            input = functional.pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
            padding = 0
        convolve = _CONVOLVE[len(self.kernel_size)]
        return convolve(input, kernels, None, self.stride, padding, self.dilation, groups)


class FactoredConv1d(FactoredConv, PackedConv1d):
    pass


class FactoredConv2d(FactoredConv, PackedConv2d):
    pass


class FactoredConv3d(FactoredConv, PackedConv3d):
    pass


FACTORED: dict[type[nn.Module], type[PackedLayer]] = {
    nn.Linear: FactoredLinear,
    nn.Conv1d: FactoredConv1d,
    nn.Conv2d: FactoredConv2d,
    nn.Conv3d: FactoredConv3d,
}
"""A layer's class -> the class that computes from factors."""


def _kernels(columns: Tensor, channels: int, kernel_size: tuple[int, ...]) -> Tensor:
    """Columns of tiles, (m h w, k), as kernels: (k, m, h, w)."""
    return columns.T.reshape(-1, channels, *kernel_size)
