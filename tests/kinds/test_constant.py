"""Tensors of one value."""

from __future__ import annotations

import pytest
import torch

from factorpack.decoding import check, decode, specs
from factorpack.record import DTYPES, Encoded
from tests.helpers import raw


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_a_constant_of_every_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.tensor([1]).to(dtype)
    encoded = Encoded("constant", shape, dtype, {"value": value})
    check("constant", encoded.layout, dtype, specs(encoded))
    found = decode(encoded)
    assert (found.shape, found.dtype, found.is_contiguous()) == (shape, dtype, True)
    assert raw(found) == raw(value) * found.numel()
