"""Bit widths for codes stored without entropy coding: one per row, and the few wider codes separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_WIDE_BITS = 20
"""Approximate bits of a separately stored code: its value, and its distance from the previous one."""
_ROW_BITS = 32
"""A row's index, when rows are stored in order of width."""
_NODE_BITS = 8 * 400
"""The nodes that put a group of rows, or the separate codes, in place."""
MAX_CODES = 1 << 24
"""FP32 represents integers exactly only up to here, and distances pass through it."""


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Rows by stored width, and the flat positions of codes wider than their row."""

    rows: Mapping[int, Tensor]
    wide: Tensor


def split(codes: Tensor) -> Split | None:
    """The split of a matrix of codes that takes the fewest bits; None if one width for all is as good.

    >>> found = split(torch.tensor([[300, -300] * 5000, [1, 0] * 4999 + [9, 9]]))
    >>> {width: rows.tolist() for width, rows in found.rows.items()}, len(found.wide)
    ({2: [1], 10: [0]}, 2)
    """
    if codes.numel() >= MAX_CODES:
        return None
    height, length = codes.shape
    widths = code_widths(codes)
    most = int(widths.max())
    places = torch.arange(height, device=codes.device)[:, None] * (most + 1) + widths
    counts = torch.bincount(places.flatten(), minlength=height * (most + 1)).reshape(height, most + 1)
    wider = length - counts.cumsum(1)  # codes of a row that need more than w bits, by w
    bits = torch.arange(most + 1, device=codes.device) * length + wider * _WIDE_BITS
    least, chosen = bits[:, 1:].min(1)
    chosen = chosen + 1
    rows = {int(width): (chosen == width).nonzero().flatten() for width in chosen.unique()}
    taken = int(least.sum()) + (len(rows) > 1) * height * _ROW_BITS + len(rows) * _NODE_BITS
    wide = (widths > chosen[:, None]).flatten().nonzero().flatten()
    taken += 3 * _NODE_BITS if len(wide) else 0
    return Split(rows, wide) if taken < most * codes.numel() else None


def code_widths(codes: Tensor) -> Tensor:
    """The bits each signed code needs.

    >>> code_widths(torch.tensor([0, -1, 1, -2, 2, -3, 127, -128, 128])).tolist()
    [1, 1, 2, 2, 3, 3, 8, 8, 9]
    """
    size = torch.where(codes < 0, -codes.int() - 1, codes.int())
    return torch.frexp(size.double()).exponent.long() + 1
