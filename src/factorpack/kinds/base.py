"""`Kind`: one way to store a tensor, and everything that the other rooms ask about it.

A *part* is one array of an `Encoded`. A *slice* is a range of a weight that can be rebuilt on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds.slices import Shapes, Slice, Tiling, cut_tiles
from factorpack.quantize.uniform import MAX_STORED_BITS, MIN_BITS, code_dtype, code_width
from factorpack.record import Encoded
from factorpack.tiles import Layout

FLOATS = (torch.float16, torch.float32)
"""The types of scales, means, codewords and levels."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What a file declares about a part before any of it is read. `bits` is 0 for a part that is not codes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int = 0


Specs = Mapping[str, PartSpec]


class Kind(ABC):
    """How one kind of tensor is stored. Subclasses are final and hold no state."""

    name: ClassVar[str]
    """Written into files."""
    title: ClassVar[str]
    """What a report calls it."""
    items: ClassVar[Mapping[str, str]]
    """Its parts, and the item of a size report that each part counts as."""
    optional_parts: ClassVar[frozenset[str]] = frozenset()
    is_coded: ClassVar[bool] = True
    """Whether it holds codes, which take less memory than the weight that they encode."""
    is_raw: ClassVar[bool] = False
    """Whether its part `values` is the tensor itself, element by element."""
    is_product: ClassVar[bool] = False
    """Whether it is a product of two factors, `codebook` and `latent`: see `kinds.product`."""
    computes_factored: ClassVar[bool] = False
    """Whether a layer can compute Z (C^T x) instead of rebuilding the weight."""
    multiplied_part: ClassVar[str | None] = None
    """The part whose codes are multiplied by scales, so that a zero is cheap."""
    threshold_part: ClassVar[str | None] = None
    """The part whose codes a threshold may have set to zero: `Encoded.extra_zeros` counts those."""
    path_part: ClassVar[str | None] = None
    """The part whose codes may be a path through a trellis."""

    @abstractmethod
    def decode(self, encoded: Encoded) -> Tensor:
        """The weight, in its own dtype and shape, of codes that `check_indices` has passed.

        No step depends on a value, so that it can be traced.
        """

    @abstractmethod
    def check_parts(self, layout: Layout, parts: Specs) -> None:
        """Raises FormatError unless the parts, whose names are correct, fit each other and the weight."""

    @abstractmethod
    def describe(self, encoded: Encoded) -> str:
        """Rank, bits and sparsity, for a person to read."""

    def check(self, layout: Layout, dtype: torch.dtype, parts: Specs) -> None:
        """Raises FormatError unless the parts are those needed for a weight of this layout and type."""
        needed, found = set(self.items) - self.optional_parts, set(parts)
        if not needed <= found <= set(self.items):
            raise FormatError(f"found parts {sorted(found)}, needed are {sorted(needed)}")
        self.check_parts(layout, parts)
        self.check_dtype(dtype, parts)

    def check_dtype(self, dtype: torch.dtype, parts: Specs) -> None:  # noqa: ARG002
        """Raises FormatError where a tensor of this type would change when it is decoded."""
        expect_rounding(torch.float32, dtype)

    def operations(self, shape: tuple[int, ...], parts: Specs) -> int:  # noqa: ARG002
        """Multiplications that decoding takes, where they are more than a few per element."""
        return 0

    def check_indices(self, encoded: Encoded) -> None:  # noqa: B027, most kinds have no table
        """Raises FormatError where a code is an index outside its table."""

    def check_values(self, encoded: Encoded) -> None:
        """Raises FormatError unless scales, means and codewords are finite and no scale is negative."""
        for name, part in encoded.parts.items():
            if name in encoded.bits:
                continue
            if not bool(part.isfinite().all()):
                raise FormatError(f"part {name!r} holds NaN or infinity")
            if name.endswith("scale") and bool((part < 0).any()):
                raise FormatError(f"part {name!r} holds a negative scale")

    def decode_into(self, encoded: Encoded, weight: Tensor) -> None:
        """`decode` into a contiguous tensor of its shape, slice by slice, converted to that tensor's type."""
        self.check_indices(encoded)
        shapes = {name: tuple(part.shape) for name, part in encoded.parts.items()}
        found = self.cut(encoded.layout, shapes)
        for each in found:
            each.write(self.decode(each.take(encoded)), weight)
        if not found:
            weight.copy_(self.decode(encoded))

    def tiling(self, parts: Shapes) -> Tiling | None:  # noqa: ARG002
        """How the parts lie along the weight's tiles; None for a kind that is not cut along tiles."""
        return None

    def cut(self, layout: Layout, parts: Shapes) -> list[Slice]:
        """The slices of a weight whose parts have these shapes; none where it can only be rebuilt whole."""
        tiling = self.tiling(parts)
        if tiling is None or layout.transposed_groups or not layout.numel:
            return []
        return cut_tiles(layout.numel, tiling, parts)

    def channel_split(self, encoded: Encoded, part: str) -> int:  # noqa: ARG002
        """How many output channels a part's columns divide into evenly, or 0."""
        return 0

    def row_part(self, encoded: Encoded) -> str | None:  # noqa: ARG002
        """The part whose codes a layer's inputs can be multiplied by, one row per output; or None."""
        return None

    def zero_share(self, encoded: Encoded) -> float | None:
        """The share of codes that are zero; None for kinds whose codes are not multiplied."""
        if self.multiplied_part is None:
            return None
        codes = encoded.parts[self.multiplied_part]
        return 1.0 - int(codes.count_nonzero()) / max(codes.numel(), 1)

    def describe_codes(self, encoded: Encoded, scale_part: str) -> str:
        """Width and zeros of the multiplied codes."""
        assert self.multiplied_part is not None
        codes, bits = encoded.parts[self.multiplied_part], encoded.bits[self.multiplied_part]
        if encoded.parts[scale_part].numel() == 1:  # the width is then that of the layer's largest code
            bits = code_width(int(codes.min()), int(codes.max()))
        trellis = ", trellis" if encoded.trellis else ""
        return f"{bits} bits, {self.zero_share(encoded):.0%} zeros{trellis}"


def cast_clamped(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, clamped to its range where it is narrow: the nearest code may lie beyond that."""
    if dtype.itemsize < 4:
        limit = torch.finfo(dtype).max
        weight = weight.clamp(-limit, limit)
    return weight.to(dtype)


def split_channels(layout: Layout, tile: int) -> int:
    """The number of output channels if each has whole tiles, and there are several; otherwise 0.

    A channel's codes are then consecutive columns, and are more alike than those of a row.
    """
    channels = layout.outputs if layout.shape else 1
    return channels if channels > 1 and (layout.numel // channels) % tile == 0 else 0


def expect_shape(parts: Specs, name: str, shape: tuple[int, ...]) -> None:
    if parts[name].shape != shape:
        raise FormatError(f"part {name!r} has shape {parts[name].shape}, expected {shape}")


def expect_dtype(parts: Specs, name: str, allowed: tuple[torch.dtype, ...]) -> None:
    if parts[name].bits or parts[name].dtype not in allowed:
        raise FormatError(f"part {name!r} is {parts[name].dtype}, allowed are {allowed}")


def expect_rows(layout: Layout, parts: Specs) -> int:
    """The number of output channels of a weight with one code per element: (out, rest)."""
    if not layout.shape or layout.numel == 0:
        raise FormatError(f"a tensor of shape {layout.shape} has no channels to quantize")
    rows = layout.outputs
    expect_shape(parts, "codes", (rows, layout.numel // rows))
    return rows


def expect_codes(parts: Specs, name: str, least_bits: int = MIN_BITS) -> None:
    part = parts[name]
    if not least_bits <= part.bits <= MAX_STORED_BITS or len(part.shape) != 2:
        raise FormatError(
            f"part {name!r} has {part.bits} bits and shape {part.shape}: expected a matrix of codes "
            f"of {least_bits} to {MAX_STORED_BITS} bits"
        )
    if part.dtype != code_dtype(part.bits):
        raise FormatError(
            f"part {name!r} is {part.dtype}, codes of {part.bits} bits are {code_dtype(part.bits)}"
        )


def expect_scale(parts: Specs, name: str, shapes: set[tuple[int, ...]]) -> None:
    expect_dtype(parts, name, FLOATS)
    if parts[name].shape not in shapes:
        raise FormatError(f"part {name!r} has shape {parts[name].shape}, expected one of {sorted(shapes)}")


def expect_same_dtype(stored: torch.dtype, dtype: torch.dtype) -> None:
    if stored != dtype:
        raise FormatError(f"{stored} values cannot represent a {dtype} tensor")


def expect_rounding(stored: torch.dtype, dtype: torch.dtype) -> None:
    """Only floats are ever rounded to another type: anything else would change."""
    if not (stored.is_floating_point and dtype.is_floating_point):
        expect_same_dtype(stored, dtype)
