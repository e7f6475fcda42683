"""Encoded -> something to train -> Encoded again: one module a kind, whose forward is the weight.

What training sees is what the file will hold: codes are rounded on the way forward, and scales too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from factorpack.quantize.straight_through import fake_codes, straight_through
from factorpack.quantize.uniform import code_range, from_codes
from factorpack.record import Encoded
from factorpack.tiles import from_out_first, from_tiles, out_first_shape


class Trainable(Protocol):
    """A module that makes a weight and can say what it would be stored as."""

    def forward(self) -> Tensor: ...

    def encoded(self) -> Encoded: ...


class QuantizedRows(nn.Module):
    """Real numbers behind codes, with a learned scale: the quantizer of learned-step quantization.

    `mask` freezes zeros. The scale's gradient is scaled by 1/sqrt(numbers sharing it x highest code), as
    Esser et al. do, so that scales and numbers learn at one rate.
    """

    def __init__(self, codes: Tensor, scale: Tensor, bits: int, mask: Tensor | None = None) -> None:
        super().__init__()
        self.bits = bits
        self.scale_dtype = scale.dtype
        self.values = nn.Parameter(from_codes(codes, scale))
        self.scale = nn.Parameter(scale.float().clone())
        self.mask: Tensor | None
        self.register_buffer("mask", mask)
        sharing = codes.numel() / scale.numel()
        self.scale_gradient = 1.0 / math.sqrt(sharing * code_range(bits)[1])

    def forward(self) -> Tensor:
        scale = self.stored_scale()
        damped = straight_through(scale * self.scale_gradient, scale)
        return self._codes(damped) * damped

    def stored_scale(self) -> Tensor:
        """The scale as the file holds it, with the gradient of the one that learns."""
        positive = self.scale.clamp_min(0)
        return straight_through(positive, positive.to(self.scale_dtype).float())

    def codes(self) -> Tensor:
        return self._codes(self.stored_scale()).detach().to(torch.int8)

    def scales(self) -> Tensor:
        return self.stored_scale().detach().to(self.scale_dtype)

    def _codes(self, scale: Tensor) -> Tensor:
        codes = fake_codes(self.values, scale, self.bits)
        codes = torch.where(scale > 0, codes, torch.zeros_like(codes))
        return codes if self.mask is None else codes * self.mask


class TrainableFactors(nn.Module):
    """W~ = Q(C) Q(Z) + mu. Where a threshold made extra zeros, the zeros of Z stay zero."""

    def __init__(self, encoded: Encoded) -> None:
        super().__init__()
        self.like = encoded
        parts, bits = encoded.parts, encoded.bits
        mask = parts["latent"] != 0 if encoded.extra_zeros else None
        self.codebook = QuantizedRows(parts["codebook"], parts["codebook_scale"], bits["codebook"])
        self.latent = QuantizedRows(parts["latent"], parts["latent_scale"], bits["latent"], mask)
        mean = parts.get("mean")
        self.mean = None if mean is None else nn.Parameter(mean.float().clone())

    def forward(self) -> Tensor:
        product = self.codebook() @ self.latent()
        matrix = product if self.mean is None else product + self.mean
        return from_tiles(matrix, self.like.shape, self.like.transposed_groups)

    def encoded(self) -> Encoded:
        parts = {
            "codebook": self.codebook.codes(),
            "codebook_scale": self.codebook.scales(),
            "latent": self.latent.codes(),
            "latent_scale": self.latent.scales(),
        }
        if self.mean is not None:
            parts["mean"] = self.mean.detach().to(self.like.parts["mean"].dtype, copy=True)
        return _like(self.like, parts)


class TrainableScalar(nn.Module):
    """W = Q(w; s): learned-step quantization of a code a weight."""

    def __init__(self, encoded: Encoded) -> None:
        super().__init__()
        self.like = encoded
        self.rows = QuantizedRows(encoded.parts["codes"], encoded.parts["scale"], encoded.bits["codes"])

    def forward(self) -> Tensor:
        groups = self.like.transposed_groups
        rows = self.rows().reshape(out_first_shape(self.like.shape, groups))
        return from_out_first(rows, groups)

    def encoded(self) -> Encoded:
        return _like(self.like, {"codes": self.rows.codes(), "scale": self.rows.scales()})


TRAINABLE: dict[str, type[TrainableFactors] | type[TrainableScalar]] = {
    "factors": TrainableFactors,
    "scalar": TrainableScalar,
}
"""Kinds that are trained in their packed form; kept tensors are trained as they are."""


def _like(encoded: Encoded, parts: dict[str, Tensor]) -> Encoded:
    return replace(encoded, parts={name: part.cpu().contiguous() for name, part in parts.items()})
