"""Encoded -> something to train -> Encoded again: one module per kind, whose forward is the weight.

Training sees what the file will hold: codes are rounded in the forward pass, and scales too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from factorpack.kinds import KINDS
from factorpack.kinds.base import cast_clamped
from factorpack.kinds.codewords import codeword_indices, sum_codewords
from factorpack.kinds.levels import level_range
from factorpack.kinds.product import Product
from factorpack.quantize.straight_through import fake_quantize, straight_through
from factorpack.quantize.uniform import code_dtype, root_mean_square, storable, to_codes
from factorpack.record import Encoded

UNITS_PER_CODE = 32.0
RMS_PER_UNIT = 16.0


def far_units(bits: int) -> float:
    """Units per code that let codes move as far as 4-bit ones do, relative to the range of their width.

    For codes that training must change a lot: weights that survived pruning, and factors of a low rank. Other
    wide codes start close to the weights they represent.
    """
    return UNITS_PER_CODE * 2.0 ** max(bits - 4, 0)


class Trainable(Protocol):
    """A module that computes a weight, and knows what it would be stored as."""

    like: Encoded
    trains_codes: ClassVar[bool]
    """Whether training changes its codes, and not only what they represent."""

    def forward(self) -> Tensor: ...

    def encoded(self) -> Encoded: ...


class QuantizedRows(nn.Module):
    """Real values behind codes, with a learned scale: the quantizer of learned-step quantization.

    Both are trained in relative units, because Adam's steps do not scale with a parameter: `numbers` in units
    of 32 first scales, so that a rate of 3e-4 moves a code by a hundredth at most, and the scale as the
    logarithm of its growth. `mask` freezes zeros; `units` other than 32 are for codes that must move far.
    Numbers that need no gradient are codes that stay as they are, whatever the scale becomes.
    """

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        bits: int,
        mask: Tensor | None = None,
        units: float = UNITS_PER_CODE,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.scale_dtype = scale.dtype
        self.units = units
        self.numbers = nn.Parameter(codes.float() / self.units)  # exact: a power of two
        self.growth = nn.Parameter(torch.zeros_like(scale, dtype=torch.float32))
        self.first_scale: Tensor
        self.register_buffer("first_scale", scale.float().clone())
        self.mask: Tensor | None
        self.register_buffer("mask", mask)

    def forward(self) -> Tensor:
        if not self.numbers.requires_grad:
            return self.numbers * self.units * self.stored_scale()
        quantized = fake_quantize(self.values(), self.stored_scale(), self.bits)
        return quantized if self.mask is None else quantized * self.mask

    def values(self) -> Tensor:
        return self.numbers * (self.first_scale * self.units)

    def unit(self) -> Tensor:
        """The numbers in units of the scale: what is rounded to codes, before it is."""
        scale = self.stored_scale()
        unit = self.values() / torch.where(scale > 0, scale, torch.inf)
        return unit if self.mask is None else unit * self.mask

    def a_code(self) -> Tensor:
        """How far `numbers` must move for a code to move by one."""
        unit = self.first_scale * self.units
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
        if not self.numbers.requires_grad:
            return (self.numbers * self.units).to(code_dtype(self.bits))
        codes = to_codes(self.values().detach(), self.stored_scale().detach(), self.bits)
        return codes if self.mask is None else codes * self.mask

    def scales(self) -> Tensor:
        return self.stored_scale().detach().to(self.scale_dtype)


class LevelRows(QuantizedRows):
    """Real values in units of a code, behind codes that select learned levels.

    A value is rounded to the nearest code, so thresholds stay half-way between codes; each level learns from
    the weights that have it. The straight-through slope of a value is half the distance between its level's
    neighbours, at the first and last level the distance to the only one. A level of zero stays zero, and
    gradients pass it unchanged. For levels -W_n, 0 and W_p these are the factors W_n, 1 and W_p of trained
    ternary quantization. Gradients are not clamped: a value beyond the last code could not return.
    """

    def __init__(self, codes: Tensor, levels: Tensor, bits: int) -> None:
        super().__init__(codes, torch.ones(1, 1), bits)
        self.growth.requires_grad_(False)  # codes have no scale of their own
        self.range = level_range(levels.shape[1])
        self.level_dtype = levels.dtype
        # Relative units again: shares of a row's largest level, or of the power of two below it, to be exact.
        largest = levels.float().abs().amax(1, keepdim=True)
        power = (largest.frexp().exponent - 1).clamp_min(-126)
        self.level_unit: Tensor
        self.register_buffer("level_unit", torch.ldexp(torch.ones_like(largest), power))
        self.shares = nn.Parameter(levels.float() / self.level_unit)
        self.learns: Tensor
        self.register_buffer("learns", levels != 0)

    def forward(self) -> Tensor:
        unit = self.unit()
        index = unit.detach().round().clamp(*self.range).long() - self.range[0]
        levels = self.stored_levels().expand(len(unit), -1)
        slope = self._slopes(levels.detach()).gather(1, index)
        return levels.gather(1, index) + slope * (unit - unit.detach())

    def _slopes(self, levels: Tensor) -> Tensor:
        """What a weight moves by for each code that its number does, level by level: (r, L)."""
        steps = levels.diff(dim=1)
        sides = torch.cat([steps[:, :1], steps, steps[:, -1:]], 1)
        return torch.where(self.learns, (sides[:, 1:] + sides[:, :-1]) / 2, 1.0)

    def stored_levels(self) -> Tensor:
        """The levels as the file holds them, with the gradient of those that learn."""
        levels = self.shares * self.learns * self.level_unit
        return straight_through(levels, levels.to(self.level_dtype).float())

    def codes(self) -> Tensor:
        return super().codes().clamp(*self.range)


class TrainableFactors(nn.Module):
    """W~ = Q(C) Q(Z) + mu. Where a threshold made extra zeros, the zeros of Z stay zero."""

    trains_codes: ClassVar[bool] = True

    def __init__(self, encoded: Encoded, frozen: bool = False) -> None:
        super().__init__()
        encoded = encoded if frozen else leave_path(encoded)
        self.like = encoded
        kind = KINDS[encoded.kind]
        assert isinstance(kind, Product)
        self.kind = kind
        parts, bits = encoded.parts, encoded.bits
        mask = parts["latent"] != 0 if encoded.extra_zeros else None
        # Factors that are both fine are an SVD's, short of rank; of others it is the rounding that is short.
        is_far = min(bits["codebook"], bits["latent"]) >= 8 and parts["latent_scale"].numel() > 1
        units = {name: far_units(width) if is_far else UNITS_PER_CODE for name, width in bits.items()}
        codebook_scale, latent_scale = parts["codebook_scale"], parts["latent_scale"]
        self.codebook = QuantizedRows(
            parts["codebook"], codebook_scale, bits["codebook"], units=units["codebook"]
        )
        self.latent = QuantizedRows(parts["latent"], latent_scale, bits["latent"], mask, units["latent"])
        for factor in (self.codebook, self.latent):
            factor.numbers.requires_grad_(not frozen)
        mean = parts.get("mean")
        self.mean = None if mean is None else nn.Parameter(mean.float().clone())

    def forward(self) -> Tensor:
        product = self.codebook() @ self.latent()
        matrix = product if self.mean is None else product + self.mean
        return self.kind.from_product(matrix, self.like.layout)

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
    """W = Q(w; s): learned-step quantization with one code per weight. A threshold's zeros stay zero."""

    trains_codes: ClassVar[bool] = True

    def __init__(self, encoded: Encoded, frozen: bool = False) -> None:
        super().__init__()
        encoded = encoded if frozen else leave_path(encoded)
        self.like = encoded
        codes, scale = encoded.parts["codes"], encoded.parts["scale"]
        mask = codes != 0 if encoded.extra_zeros else None
        bits = encoded.bits["codes"]
        units = UNITS_PER_CODE if mask is None else far_units(bits)
        self.rows = QuantizedRows(codes, scale, bits, mask, units)
        self.rows.numbers.requires_grad_(not frozen)

    def forward(self) -> Tensor:
        return self.like.layout.from_tiles(self.rows().T)

    def encoded(self) -> Encoded:
        return _like(self.like, {"codes": self.rows.codes(), "scale": self.rows.scales()})


class TrainableLevels(nn.Module):
    """W = v[Q(w)]: one code per weight, and learned levels."""

    trains_codes: ClassVar[bool] = True

    def __init__(self, encoded: Encoded, frozen: bool = False) -> None:
        super().__init__()
        self.like = encoded
        self.rows = LevelRows(encoded.parts["codes"], encoded.parts["levels"], encoded.bits["codes"])
        self.rows.numbers.requires_grad_(not frozen)

    def forward(self) -> Tensor:
        return self.like.layout.from_tiles(self.rows().T)

    def encoded(self) -> Encoded:
        levels = self.rows.stored_levels().detach().to(self.rows.level_dtype)
        return _like(self.like, {"codes": self.rows.codes(), "levels": levels})


class TrainableCodewords(nn.Module):
    """Codewords that learn; which tiles share one stays fixed.

    A codeword's gradient is the sum of its tiles'; BGD takes their mean, which is the same to Adam. The
    `numbers` are in units of about 16 times the codebook's RMS, so that learning rates that suit codes suit
    them too: 3e-4 moves a codeword by half a percent of the RMS at most.
    """

    trains_codes: ClassVar[bool] = False

    def __init__(self, encoded: Encoded, _frozen: bool = False) -> None:
        super().__init__()
        self.like = encoded
        codebook = encoded.parts["codebook"].float()
        rms = root_mean_square(codebook)
        # A power of two, so that untrained values are stored exactly as they were.
        self.unit = 2.0 ** round(math.log2(RMS_PER_UNIT * rms)) if rms else 1.0
        self.numbers = nn.Parameter(codebook / self.unit)
        self.indices: Tensor
        self.register_buffer("indices", codeword_indices(encoded))

    def forward(self) -> Tensor:
        values = self.numbers * self.unit
        codebook = straight_through(values, self._stored(values).float())
        tiles = sum_codewords(codebook, self.indices)
        return self.like.layout.from_tiles(tiles.T)

    def _stored(self, values: Tensor) -> Tensor:
        return cast_clamped(values.detach(), self.like.parts["codebook"].dtype)

    def encoded(self) -> Encoded:
        codebook = self._stored(self.numbers * self.unit)
        return _like(self.like, {"codebook": codebook, "indices": self.like.parts["indices"]})


TRAINABLE: dict[
    str,
    type[TrainableFactors] | type[TrainableScalar] | type[TrainableLevels] | type[TrainableCodewords],
] = {
    "factors": TrainableFactors,
    "spatial": TrainableFactors,
    "codewords": TrainableCodewords,
    "scalar": TrainableScalar,
    "levels": TrainableLevels,
}
"""Kinds that are trained in their packed form. Kept tensors are trained as they are; every other kind stays
fixed, as it was stored."""


def leave_path(encoded: Encoded) -> Encoded:
    """Codes along a trellis as plain codes of twice the step, which take about as many bits; others as they are."""
    if not encoded.trellis:
        return encoded
    path, scale = ("latent", "latent_scale") if KINDS[encoded.kind].is_product else ("codes", "scale")
    codes, step = encoded.parts[path], encoded.parts[scale]
    plain = (codes.float() / 2).round_().to(codes.dtype)  # halves to even, so that nothing shrinks on average
    parts = {**encoded.parts, path: plain, scale: storable(2 * step.float())}
    return replace(encoded, parts=parts, trellis=0)


def _like(encoded: Encoded, parts: dict[str, Tensor]) -> Encoded:
    return replace(encoded, parts={name: part.cpu().contiguous() for name, part in parts.items()})
