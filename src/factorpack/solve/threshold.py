"""Hard thresholding: the projection onto sparse matrices, counted as the paper counts it."""

from __future__ import annotations

import torch
from torch import Tensor


def extra_zero_mask(quantized: Tensor, latent: Tensor, extra: float) -> Tensor:
    """Which entries stay: True but for the smallest `extra` share of all entries that are not zero yet.

    Entries are sorted by the absolute value of what is stored (`quantized`), and among equals by the
    real-valued `latent` they came from. Entries that rounding already made zero are not counted: the
    sparsity is on top of theirs. Where fewer non-zeros are left than asked for, all of them go.
    """
    keep = torch.ones(quantized.numel(), dtype=torch.bool, device=quantized.device)
    size = quantized.abs().flatten()
    alive = size.nonzero().squeeze(1)
    count = min(round(extra * quantized.numel()), alive.numel())
    if count:
        by_latent = alive[latent.abs().flatten()[alive].argsort(stable=True)]
        keep[by_latent[size[by_latent].argsort(stable=True)][:count]] = False
    return keep.reshape(quantized.shape)
