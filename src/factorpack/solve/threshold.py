"""Hard thresholding: the projection onto sparse matrices, counted as the paper counts it."""

from __future__ import annotations

import torch
from torch import Tensor


def extra_zero_mask(quantized: Tensor, latent: Tensor, extra: float) -> Tensor:
    """Which entries stay: True but for the smallest `extra` share of all entries that are not zero yet.

    Entries that rounding already made zero are not counted: the sparsity is on top of theirs, and they
    stay True. Where fewer non-zeros are left than asked for, all of them go.
    """
    return largest_mask(quantized, latent, entries_kept(quantized, extra)) | (quantized == 0)


def entries_kept(quantized: Tensor, extra: float) -> int:
    """S: the non-zero entries left once an `extra` share of all entries has joined rounding's zeros."""
    return max(int(quantized.count_nonzero()) - round(extra * quantized.numel()), 0)


def largest_mask(quantized: Tensor, latent: Tensor, count: int) -> Tensor:
    """M: True for the `count` largest entries of `quantized` by absolute value, ties by `latent`'s."""
    size, finer = quantized.abs().flatten(), latent.abs().flatten()
    if count <= 0:
        return torch.zeros_like(quantized, dtype=torch.bool)
    if count >= size.numel():
        return torch.ones_like(quantized, dtype=torch.bool)
    edge = size.kthvalue(size.numel() - count + 1).values
    mask = size > edge
    tied = (size == edge).nonzero().squeeze(1)
    order = finer[tied].argsort(descending=True, stable=True)
    mask[tied[order[: count - int(mask.sum())]]] = True
    return mask.reshape(quantized.shape)
