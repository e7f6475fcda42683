"""Kind "scalar": one code per weight, W = q s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.kinds.base import Kind, Specs, cast_clamped, expect_codes, expect_rows, expect_scale
from factorpack.kinds.slices import Shapes, Tiling
from factorpack.quantize.uniform import from_codes
from factorpack.record import Encoded
from factorpack.tiles import Layout


class ScalarCodes(Kind):
    """Codes (out, rest), and one scale per output channel (out, 1) or one for all (1, 1)."""

    name = "scalar"
    title = "one code per weight"
    items: ClassVar[Mapping[str, str]] = {"codes": "latent", "scale": "scales"}
    multiplied_part = "codes"
    threshold_part = "codes"
    path_part = "codes"

    def decode(self, encoded: Encoded) -> Tensor:
        rows = from_codes(encoded.parts["codes"], encoded.parts["scale"])
        return cast_clamped(encoded.layout.from_tiles(rows.T), encoded.dtype)

    def check_parts(self, layout: Layout, parts: Specs) -> None:
        expect_codes(parts, "codes")
        rows = expect_rows(layout, parts)
        expect_scale(parts, "scale", {(rows, 1), (1, 1)})

    def describe(self, encoded: Encoded) -> str:
        return self.describe_codes(encoded, "scale")

    def tiling(self, parts: Shapes) -> Tiling:
        return Tiling(parts["codes"][1], {"codes": 0, "scale": 0})

    def row_part(self, encoded: Encoded) -> str | None:
        return "codes" if len(encoded.shape) == 2 and not may_clamp(encoded) else None


def may_clamp(encoded: Encoded) -> bool:
    """Whether a weight may exceed the range of its type: it is then clamped, and products with codes are not."""
    largest = encoded.parts["scale"].float().abs().max().item() * (1 << (encoded.bits["codes"] - 1))
    return not largest <= torch.finfo(encoded.dtype).max
