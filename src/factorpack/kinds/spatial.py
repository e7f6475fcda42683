"""Kind "spatial": low-rank filters, C of (in, h) and Z of (out, w)."""

from __future__ import annotations

from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds.base import Specs
from factorpack.kinds.product import Product, expect_codebook, expect_latent
from factorpack.kinds.slices import Range, Shapes, Slice, ranges_along, slice_step
from factorpack.tiles import Layout


class Spatial(Product):
    name = "spatial"
    title = "low-rank filters"

    def from_product(self, matrix: Tensor, layout: Layout) -> Tensor:
        return layout.from_spatial(matrix)

    def check_parts(self, layout: Layout, parts: Specs) -> None:
        tile = expect_codebook(layout, parts)
        if len(layout.shape) < 2:
            raise FormatError(
                f"a tensor of shape {layout.shape} has no filters, expected two dimensions or more"
            )
        outputs, inputs, height, width = layout.spatial_shape
        if tile != inputs * height:
            raise FormatError(f"a codebook of {tile} rows for {inputs} inputs and filters {height} high")
        expect_latent(parts, outputs * width)

    def cut(self, layout: Layout, parts: Shapes) -> list[Slice]:
        """Slices are some input channels of every filter."""
        if layout.transposed_groups or not layout.numel:
            return []
        outputs, inputs, height, width = layout.spatial_shape
        kernel = layout.shape[2:]
        step = slice_step(outputs * height * width, layout.numel)
        return [
            Slice(
                (outputs, length, *kernel),
                ranges_along({"codebook": 0}, parts, inputs * height, start * height, length * height),
                (outputs, inputs, height * width),
                Range(1, start, length),
            )
            for start in range(0, inputs, step)
            for length in (min(step, inputs - start),)
        ]
