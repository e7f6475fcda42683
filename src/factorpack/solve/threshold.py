"""Hard thresholding: the projection onto sparse matrices, with the paper's definition of sparsity."""

from __future__ import annotations

import torch
from torch import Tensor


def extra_zero_mask(quantized: Tensor, latent: Tensor, extra: float) -> Tensor:
    """Which elements stay: False for the smallest non-zero ones, an `extra` share of all elements.

    Elements that rounding already made zero stay True: the sparsity is in addition to theirs. If there are
    fewer non-zeros than requested, all of them go.
    """
    return largest_mask(quantized, latent, entries_kept(quantized, extra)) | (quantized == 0)


def entries_kept(quantized: Tensor, extra: float) -> int:
    """S: the non-zeros left after an `extra` share of all elements is set to zero on top of rounding's zeros."""
    return max(int(quantized.count_nonzero()) - round(extra * quantized.numel()), 0)


def largest_mask(quantized: Tensor, latent: Tensor, count: int) -> Tensor:
    """M: True for the `count` largest elements of `quantized` by magnitude, ties by that of `latent`."""
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
