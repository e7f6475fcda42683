"""Encoded -> something to train -> Encoded again: one module a kind, whose forward is the weight.

What training sees is what the file will hold: codes are rounded on the way forward, and scales too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from factorpack.quantize.straight_through import fake_quantize, straight_through
from factorpack.quantize.uniform import to_codes
from factorpack.record import Encoded
from factorpack.tiles import from_out_first, from_tiles, out_first_shape

UNITS_A_CODE = 32.0


class Trainable(Protocol):
    """A module that makes a weight and can say what it would be stored as."""

    like: Encoded

    def forward(self) -> Tensor: ...

    def encoded(self) -> Encoded: ...


class QuantizedRows(nn.Module):
    """Real numbers behind codes, with a learned scale: the quantizer of learned-step quantization.

    Both are trained in relative units, because Adam's steps know no others: `numbers` in 32nds of the
    first scale, so that a rate of 3e-4 moves a code by a hundredth at most, and the scale as the logarithm
    of its growth. `mask` freezes zeros.
    """

    def __init__(self, codes: Tensor, scale: Tensor, bits: int, mask: Tensor | None = None) -> None:
        super().__init__()
        self.bits = bits
        self.scale_dtype = scale.dtype
        self.numbers = nn.Parameter(codes.float() / UNITS_A_CODE)  # exact: a power of two
        self.growth = nn.Parameter(torch.zeros_like(scale, dtype=torch.float32))
        self.first_scale: Tensor
        self.register_buffer("first_scale", scale.float().clone())
        self.mask: Tensor | None
        self.register_buffer("mask", mask)

    def forward(self) -> Tensor:
        quantized = fake_quantize(self.values(), self.stored_scale(), self.bits)
        return quantized if self.mask is None else quantized * self.mask

    def values(self) -> Tensor:
        return self.numbers * (self.first_scale * UNITS_A_CODE)

    def unit(self) -> Tensor:
        """The numbers in units of the scale: what is rounded to codes, before it is."""
        scale = self.stored_scale()
        unit = self.values() / torch.where(scale > 0, scale, torch.inf)
        return unit if self.mask is None else unit * self.mask

    def a_code(self) -> Tensor:
        """How far `numbers` must move for a code to move by one."""
        unit = self.first_scale * UNITS_A_CODE
        return self.stored_scale() / torch.where(unit > 0, unit, torch.inf)

    def put(self, where: Tensor, codes: Tensor) -> None:
        """Makes the numbers under a mask those that codes stand for."""
        with torch.no_grad():
            self.numbers.copy_(torch.where(where, codes * self.a_code(), self.numbers))

    def stored_scale(self) -> Tensor:
        """The scale as the file holds it, with the gradient of the one that learns."""
        scale = self.first_scale * self.growth.exp()
        return straight_through(scale, scale.to(self.scale_dtype).float())

    def codes(self) -> Tensor:
        codes = to_codes(self.values().detach(), self.stored_scale().detach(), self.bits)
        return codes if self.mask is None else codes * self.mask

    def scales(self) -> Tensor:
        return self.stored_scale().detach().to(self.scale_dtype)


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
