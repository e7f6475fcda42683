"""Kind "codewords": each tile is a codeword, or a sum of one codeword per stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds.base import (
    FLOATS,
    Kind,
    Specs,
    cast_clamped,
    expect_codes,
    expect_dtype,
    expect_shape,
    split_channels,
)
from factorpack.kinds.slices import Shapes, Tiling
from factorpack.quantize.uniform import MIN_BITS, code_range
from factorpack.record import Encoded
from factorpack.tiles import Layout

SUM_OPERATIONS = 64
"""Multiplications of a matrix product that take as long as adding one element of a codeword."""


class Codewords(Kind):
    """Tile j = sum over stages m of codebook[m k + index[m, j]]: vector, or additive quantization."""

    name = "codewords"
    title = "codewords"
    items: ClassVar[Mapping[str, str]] = {"codebook": "codebook", "indices": "latent"}

    def decode(self, encoded: Encoded) -> Tensor:
        codebook = encoded.parts["codebook"].float()
        tiles = sum_codewords(codebook, _codebook_rows(encoded))
        return cast_clamped(encoded.layout.from_tiles(tiles.T), encoded.dtype)

    def check_parts(self, layout: Layout, parts: Specs) -> None:
        expect_codes(parts, "indices")
        expect_dtype(parts, "codebook", FLOATS)
        numel = layout.numel
        if numel == 0:
            raise FormatError(f"an empty tensor of shape {layout.shape} has no codewords")
        book, stages = parts["codebook"].shape, parts["indices"].shape[0]
        if len(book) != 2 or stages < 1 or book[0] < stages or book[0] % stages or not 1 <= book[1] <= numel:
            raise FormatError(f"a codebook of shape {book} does not suit {stages} stages of {numel} elements")
        expect_shape(parts, "indices", (stages, layout.tile_count(book[1])))
        needed = index_bits(book[0] // stages)
        if parts["indices"].bits != needed:
            raise FormatError(
                f"indices of {parts['indices'].bits} bits, {book[0] // stages} codewords have {needed}"
            )

    def operations(self, shape: tuple[int, ...], parts: Specs) -> int:
        return SUM_OPERATIONS * parts["indices"].shape[0] * math.prod(shape)

    def check_indices(self, encoded: Encoded) -> None:
        _check_indices(encoded)

    def check_values(self, encoded: Encoded) -> None:
        super().check_values(encoded)
        _check_indices(encoded)

    def describe(self, encoded: Encoded) -> str:
        stages, tile = len(encoded.parts["indices"]), encoded.parts["codebook"].shape[1]
        books = f"{stages} x " if stages > 1 else ""
        count, bits = _codewords_per_stage(encoded), encoded.bits["indices"]
        return f"{books}{count} codewords of {tile} values, {bits} bits"

    def tiling(self, parts: Shapes) -> Tiling:
        return Tiling(parts["codebook"][1], {"indices": 1})

    def channel_split(self, encoded: Encoded, part: str) -> int:
        return split_channels(encoded.layout, encoded.parts["codebook"].shape[1]) if part == "indices" else 0


def codeword_indices(encoded: Encoded) -> Tensor:
    """The rows of the codebook that make each tile, (stages, n); FormatError where one is not its stage's."""
    _check_indices(encoded)
    return _codebook_rows(encoded)


def sum_codewords(codebook: Tensor, indices: Tensor) -> Tensor:
    """(stages k, d) and (stages, n) -> (n, d), stage by stage, so that every reader rounds the same way."""
    total = codebook.index_select(0, indices[0])
    for stage in indices[1:]:
        total = total + codebook.index_select(0, stage)
    return total


def index_bits(count: int) -> int:
    """The width of indices into `count` codewords: no code is narrower than 2 bits.

    >>> [index_bits(count) for count in (1, 4, 5, 256, 257)]
    [2, 2, 3, 8, 9]
    """
    return max((count - 1).bit_length(), MIN_BITS)


def _check_indices(encoded: Encoded) -> None:
    codes, count = encoded.parts["indices"], _codewords_per_stage(encoded)
    low, _ = code_range(encoded.bits["indices"])
    first, last = int(codes.min()) - low, int(codes.max()) - low
    if first < 0 or last >= count:
        raise FormatError(
            f"part 'indices' holds {first} to {last}, a codebook has codewords 0 to {count - 1}"
        )


def _codebook_rows(encoded: Encoded) -> Tensor:
    codes, count = encoded.parts["indices"], _codewords_per_stage(encoded)
    low, _ = code_range(encoded.bits["indices"])
    starts = torch.arange(0, count * len(codes), count, device=codes.device, dtype=torch.int32)
    return codes.to(torch.int32) - low + starts[:, None]


def _codewords_per_stage(encoded: Encoded) -> int:
    return len(encoded.parts["codebook"]) // len(encoded.parts["indices"])
