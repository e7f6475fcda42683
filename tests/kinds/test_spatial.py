"""Low-rank filters."""

from __future__ import annotations

from dataclasses import replace

import torch

from factorpack.decoding import decode
from tests.kinds.coded import codes, factors


def test_spatial_factors_by_the_formula() -> None:
    """W[o, i, y, x] = sum_k v[k, i, y] u[o, k, x]."""
    vertical, horizontal = codes(15, 2), codes(2, 28, seed=1)
    encoded = replace(factors(vertical, horizontal, (7, 5, 3, 4)), kind="spatial")
    v, u = vertical.double().reshape(5, 3, 2), horizontal.double().reshape(2, 7, 4)
    assert torch.equal(decode(encoded).double(), torch.einsum("iyk,kox->oiyx", v, u))
