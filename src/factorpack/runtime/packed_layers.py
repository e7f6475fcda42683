"""Layers whose weight is packed. To other code they look as before: class, settings, bias, hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from factorpack.runtime.coded_weight import CodedWeight
from factorpack.runtime.multiply import multiply, on_gpu
from factorpack.runtime.packed_weight import PackedWeight

HeldWeight = PackedWeight | CodedWeight


class PackedLayer(nn.Module):
    """A layer's own forward, with a `weight` that is rebuilt whenever it is read."""

    packed: PackedWeight

    def _rebuilt(self) -> Tensor:
        return self.packed.forward()

    weight: Any = property(_rebuilt)  # a parameter in the classes it is mixed with, which own the name

    def prepare(self) -> None:
        """What a class computes once, when a layer is converted to it."""


class PackedLinear(PackedLayer, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        packed = self.packed
        if packed.has_product and input.numel() == self.in_features and on_gpu(input):
            dtype = compute_dtype(input)
            is_differentiated = torch.is_grad_enabled() and input.requires_grad
            if dtype.itemsize == 2 and not is_differentiated:
                outputs = packed.multiplied(input if input.dtype is dtype else input.to(dtype))
                return outputs if self.bias is None else outputs + self.bias.to(dtype)
        if "codes" not in packed.in_rows or not on_gpu(input):
            return super().forward(input)
        return self.multiplied(input.to(compute_dtype(input)), "codes", packed.row_scale)

    def multiplied(self, inputs: Tensor, name: str, scale: Tensor | None) -> Tensor:
        """Inputs (..., codes per row) times rows of codes, plus the bias: (..., outputs)."""
        packed = self.packed
        rows = inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1])
        outputs = multiply(rows, getattr(packed, name), packed.bits[name], scale)
        if inputs.dim() != 2:
            outputs = outputs.view(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias.to(inputs.dtype)


class PackedConv1d(PackedLayer, nn.Conv1d):
    pass


class PackedConv2d(PackedLayer, nn.Conv2d):
    pass


class PackedConv3d(PackedLayer, nn.Conv3d):
    pass


class PackedConvTranspose1d(PackedLayer, nn.ConvTranspose1d):
    pass


class PackedConvTranspose2d(PackedLayer, nn.ConvTranspose2d):
    pass


class PackedConvTranspose3d(PackedLayer, nn.ConvTranspose3d):
    pass


class PackedEmbedding(PackedLayer, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        """Rebuilds only the requested rows, where they are fewer than all and have codes of their own."""
        if self.max_norm is not None or input.numel() >= self.num_embeddings or not self.packed.has_rows:
            return super().forward(input)
        return self.packed.rows(input.reshape(-1)).view(*input.shape, self.embedding_dim)


PACKED: dict[type[nn.Module], type[PackedLayer]] = {
    nn.Linear: PackedLinear,
    nn.Conv1d: PackedConv1d,
    nn.Conv2d: PackedConv2d,
    nn.Conv3d: PackedConv3d,
    nn.ConvTranspose1d: PackedConvTranspose1d,
    nn.ConvTranspose2d: PackedConvTranspose2d,
    nn.ConvTranspose3d: PackedConvTranspose3d,
    nn.Embedding: PackedEmbedding,
}
"""A layer's class -> its packed class. A subclass may use its weight in any way, so subclasses are not packed."""


def hold_packed(layer: nn.Module, cls: type[PackedLayer], weight: HeldWeight) -> None:
    """Converts a layer to a packed class in place, so that every reference to it now sees the packed layer."""
    del layer._parameters["weight"]
    layer.__class__ = cls
    assert isinstance(layer, PackedLayer)
    layer.packed = weight  # type: ignore[assignment]  # a coded one has no rows and no product, which is asked first
    layer.prepare()


def compute_dtype(input: Tensor) -> torch.dtype:
    """The type torch multiplies this input in: autocast leaves FP64 alone."""
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return input.dtype
