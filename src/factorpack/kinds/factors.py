"""Kind "factors": the columns of C Z + mu 1^T are the weight's tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from factorpack.kinds.base import FLOATS, Specs, expect_dtype, expect_shape
from factorpack.kinds.product import PRODUCT_ITEMS, Product, expect_codebook, expect_latent
from factorpack.kinds.slices import Range, Shapes, Slice, Tiling, ranges_along, slice_step
from factorpack.record import Encoded
from factorpack.tiles import Layout

_ROW_AXES = {"codebook": 0, "mean": 0}
"""The axis of each part that has one entry per row of the tiles."""


class Factors(Product):
    name = "factors"
    title = "quantized factors"
    items: ClassVar[Mapping[str, str]] = {**PRODUCT_ITEMS, "mean": "mean"}
    optional_parts = frozenset({"mean"})
    computes_factored = True
    threshold_part = "latent"

    def from_product(self, matrix: Tensor, layout: Layout) -> Tensor:
        return layout.from_tiles(matrix)

    def check_parts(self, layout: Layout, parts: Specs) -> None:
        tile = expect_codebook(layout, parts)
        expect_latent(parts, layout.tile_count(tile))
        if "mean" in parts:
            expect_shape(parts, "mean", (tile, 1))
            expect_dtype(parts, "mean", FLOATS)

    def tiling(self, parts: Shapes) -> Tiling:
        return Tiling(parts["codebook"][0], {"latent": 1, "latent_scale": 1})

    def cut(self, layout: Layout, parts: Shapes) -> list[Slice]:
        """Where the codebook is the larger factor, slices are the same rows of every tile."""
        tile = parts["codebook"][0]
        count = layout.tile_count(tile)
        if layout.transposed_groups or not 0 < count < tile or layout.numel % tile:
            return super().cut(layout, parts)
        step = slice_step(count, layout.numel)
        return [
            Slice(
                (count * length,),
                ranges_along(_ROW_AXES, parts, tile, start, length),
                (count, tile),
                Range(1, start, length),
            )
            for start in range(0, tile, step)
            for length in (min(step, tile - start),)
        ]

    def row_part(self, encoded: Encoded) -> str | None:
        """Whole tiles must make each row of the matrix."""
        is_matrix = len(encoded.shape) == 2
        return "latent" if is_matrix and encoded.shape[1] % len(encoded.parts["codebook"]) == 0 else None
