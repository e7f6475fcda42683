"""What the kinds that are a product of two factors share: W~ = C Z + mu 1^T, with C and Z as codes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds.base import (
    Kind,
    Specs,
    cast_clamped,
    expect_codes,
    expect_scale,
    expect_shape,
    split_channels,
)
from factorpack.quantize.uniform import from_codes
from factorpack.record import Encoded
from factorpack.tiles import Layout

PRODUCT_ITEMS = {
    "codebook": "codebook",
    "codebook_scale": "scales",
    "latent": "latent",
    "latent_scale": "scales",
}
_NARROW = 16
"""Elements of a tile below which two tiles are multiplied as one."""


class Product(Kind):
    """Codes (d, k) and (k, n) times their scales, plus the centring vector (d, 1) where there is one."""

    items: ClassVar[Mapping[str, str]] = PRODUCT_ITEMS
    is_product = True
    multiplied_part = "latent"
    path_part = "latent"

    @abstractmethod
    def from_product(self, matrix: Tensor, layout: Layout) -> Tensor:
        """W~ (d, n) -> the weight."""

    def decode(self, encoded: Encoded) -> Tensor:
        return cast_clamped(self.from_product(_multiply_factors(encoded), encoded.layout), encoded.dtype)

    def operations(self, shape: tuple[int, ...], parts: Specs) -> int:  # noqa: ARG002
        return math.prod(parts["codebook"].shape) * parts["latent"].shape[1]

    def describe(self, encoded: Encoded) -> str:
        rank = int(encoded.parts["latent"].any(1).count_nonzero())
        codes = self.describe_codes(encoded, "latent_scale")
        return f"rank {rank} of {len(encoded.parts['codebook'])}, {codes}"

    def channel_split(self, encoded: Encoded, part: str) -> int:
        """Tiles that divide a filter make each column of the latent belong to one output channel."""
        return split_channels(encoded.layout, len(encoded.parts["codebook"])) if part == "latent" else 0


def expect_codebook(layout: Layout, parts: Specs) -> int:
    """The tile of a product of codes for a weight of this layout."""
    expect_codes(parts, "codebook")
    expect_codes(parts, "latent")
    if layout.numel == 0:
        raise FormatError(f"an empty tensor of shape {layout.shape} has no factors")
    tile, rank = parts["codebook"].shape
    if not 1 <= rank <= tile <= layout.numel:
        raise FormatError(f"a codebook of {tile} x {rank} does not suit a weight of {layout.numel} elements")
    return tile


def expect_latent(parts: Specs, count: int) -> None:
    """The latent of `count` tiles, and the scales of both factors."""
    rank = parts["codebook"].shape[1]
    expect_shape(parts, "latent", (rank, count))
    expect_scale(parts, "codebook_scale", {(1, rank), (1, 1)})
    expect_scale(parts, "latent_scale", {(rank, 1), (1, count), (1, 1)})


def _multiply_factors(encoded: Encoded) -> Tensor:
    """W~, with each tile contiguous in memory: the order in which tiles make the weight.

    Two narrow tiles are multiplied as one, with C twice along a diagonal: a matrix product only a few
    elements wide takes four times as long. FP16 scales cannot overflow, so what meets the zeros is finite.
    """
    # Products of the same numbers differ in their last bits if these lie in another order in memory.
    codebook = from_codes(encoded.parts["codebook"], encoded.parts["codebook_scale"]).contiguous()
    latent = from_codes(encoded.parts["latent"].T, encoded.parts["latent_scale"].T).contiguous()  # (n, k)
    mean = encoded.parts.get("mean")
    row = None if mean is None else mean.T.to(latent.dtype)
    (tile, rank), count = codebook.shape, len(latent)
    scales = (encoded.parts["codebook_scale"], encoded.parts["latent_scale"])
    if tile < _NARROW and count % 2 == 0 and all(scale.dtype == torch.float16 for scale in scales):
        codebook, latent = torch.block_diag(codebook, codebook), latent.reshape(count // 2, 2 * rank)
        row = None if row is None else row.repeat(1, 2)
    tiles = latent @ codebook.T if row is None else torch.addmm(row, latent, codebook.T)
    return tiles.reshape(count, tile).T
