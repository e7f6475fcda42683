"""A few of many positions, evenly spaced."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def spread_evenly(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` positions of `count`, at least one: a tensor that is kept, and not to be changed.

    Multiples of the golden ratio have no period: they never align with a tile or an image's width.
    """
    if count <= max(most, 1):
        return torch.arange(count, device=device)
    golden = torch.arange(max(most, 1), dtype=torch.float64, device=device) * 0.6180339887498949
    return ((golden % 1.0) * count).long()
