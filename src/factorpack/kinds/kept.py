"""Kind "keep": the values themselves, perhaps in a narrower type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds.base import Kind, Specs, expect_rounding, expect_shape
from factorpack.quantize.mantissas import FEWEST_ROUNDED, FLOAT_TYPES, used_bits
from factorpack.record import Encoded, dtype_name
from factorpack.tiles import Layout


class Kept(Kind):
    name = "keep"
    title = "kept as they are"
    items: ClassVar[Mapping[str, str]] = {"values": "values"}
    is_coded = False
    is_raw = True

    def decode(self, encoded: Encoded) -> Tensor:
        return encoded.parts["values"].to(encoded.dtype, copy=True)  # the caller may train the result

    def decode_into(self, encoded: Encoded, weight: Tensor) -> None:
        weight.copy_(encoded.parts["values"].to(encoded.dtype))

    def check_parts(self, layout: Layout, parts: Specs) -> None:
        expect_shape(parts, "values", layout.shape)
        if parts["values"].bits:
            raise FormatError("kept values are stored as they are, not as codes")

    def check_dtype(self, dtype: torch.dtype, parts: Specs) -> None:
        expect_rounding(parts["values"].dtype, dtype)

    def check_values(self, encoded: Encoded) -> None:
        """Kept values may be anything."""

    def describe(self, encoded: Encoded) -> str:
        values = encoded.parts["values"]
        found = f"kept as {dtype_name(values.dtype)}"
        if values.ndim != 1 or values.dtype not in FLOAT_TYPES:
            return found
        bits = used_bits(values)
        is_rounded = len(values) >= FEWEST_ROUNDED and 0 < bits < FLOAT_TYPES[values.dtype].mantissa_bits
        return f"{found}, {bits} bits of mantissa" if is_rounded else found
