"""Kind "levels": one code per weight, which selects one of a few values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds.base import Kind, Specs, cast_clamped, expect_codes, expect_rows, expect_scale
from factorpack.kinds.slices import Shapes, Tiling
from factorpack.record import Encoded
from factorpack.tiles import Layout

LEAST_LEVEL_BITS = 1
"""One bit selects between two levels; codes that are multiplied have no use for just -1 and 0."""


class Levels(Kind):
    """W = v[q + floor(L/2)]: codes (out, rest), and L levels v per channel (out, L) or for all (1, L)."""

    name = "levels"
    title = "levels"
    items: ClassVar[Mapping[str, str]] = {"codes": "latent", "levels": "scales"}
    path_part = "codes"

    def decode(self, encoded: Encoded) -> Tensor:
        codes, table = encoded.parts["codes"], encoded.parts["levels"]
        low, _ = level_range(table.shape[1])
        rows = table.float().expand(len(codes), -1).gather(1, codes.long().sub_(low))
        return cast_clamped(encoded.layout.from_tiles(rows.T), encoded.dtype)

    def check_parts(self, layout: Layout, parts: Specs) -> None:
        expect_codes(parts, "codes", LEAST_LEVEL_BITS)
        rows, most = expect_rows(layout, parts), 1 << parts["codes"].bits
        found = parts["levels"].shape
        if len(found) != 2 or not 2 <= found[1] <= most:
            raise FormatError(f"levels of shape {found}, expected 2 to {most} in each row of a matrix")
        expect_scale(parts, "levels", {(rows, found[1]), (1, found[1])})

    def check_indices(self, encoded: Encoded) -> None:
        codes, count = encoded.parts["codes"], encoded.parts["levels"].shape[1]
        low, high = level_range(count)
        first, last = int(codes.min()), int(codes.max())
        if first < low or last > high:
            raise FormatError(f"codes {first} to {last}, {count} levels allow {low} to {high}")

    def describe(self, encoded: Encoded) -> str:
        return f"{encoded.parts['levels'].shape[1]} levels"

    def tiling(self, parts: Shapes) -> Tiling:
        return Tiling(parts["codes"][1], {"codes": 0, "levels": 0})


def level_range(count: int) -> tuple[int, int]:
    """The codes of the first and the last level. 0 is the middle one, or the first above the middle.

    >>> level_range(3), level_range(4)
    ((-1, 1), (-2, 1))
    """
    return -(count // 2), count - 1 - count // 2
