"""Kind "constant": a tensor filled with one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds.base import Kind, Specs, expect_same_dtype, expect_shape
from factorpack.record import Encoded
from factorpack.tiles import Layout


class Constant(Kind):
    name = "constant"
    title = "one value"
    items: ClassVar[Mapping[str, str]] = {"value": "values"}
    is_coded = False

    def decode(self, encoded: Encoded) -> Tensor:
        return encoded.parts["value"].reshape(()).expand(encoded.shape).clone().to(encoded.dtype)

    def check_parts(self, layout: Layout, parts: Specs) -> None:  # noqa: ARG002
        expect_shape(parts, "value", (1,))
        if parts["value"].bits:
            raise FormatError("a constant is stored as it is, not as a code")

    def check_dtype(self, dtype: torch.dtype, parts: Specs) -> None:
        expect_same_dtype(parts["value"].dtype, dtype)

    def check_values(self, encoded: Encoded) -> None:
        """A constant may be anything."""

    def describe(self, encoded: Encoded) -> str:  # noqa: ARG002
        return "one value everywhere"
