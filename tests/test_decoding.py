"""Types too narrow for the nearest code."""

from __future__ import annotations

import pytest
import torch

from factorpack.decoding import decode
from factorpack.methods import QSPCA, Method, Scalar
from factorpack.weight import Weight
from tests.helpers import seeded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("method", [Scalar(2, "minmax"), Scalar(4), QSPCA(8, 4, tile=16)])
def test_codes_beyond_a_narrow_type_stop_at_its_largest(dtype: torch.dtype, method: Method) -> None:
    limit = min(torch.finfo(dtype).max, 9e35)
    weight = (seeded(64, 64).clamp(-1, 1) * limit).to(dtype)
    assert decode(method.encode(Weight(weight))).float().isfinite().all()
