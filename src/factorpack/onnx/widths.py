"""Bit widths for codes stored without entropy coding: one per row, and the few wider codes separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WIDE_BITS = 20
"""Approximate bits of a separately stored code: its value, and its distance from the previous one."""
_ROW_BITS = 32
"""A row's index, when rows are stored in order of width."""
_NODE_BITS = 8 * 400
"""The nodes that put a group of rows, or the separate codes, in place."""
MAX_DISTANCE = 1 << 24
"""FP32 represents integers exactly only up to here, and distances pass through it."""
MAX_CODES = (1 << 31) - 1
"""Positions are added up as 32-bit integers."""
_AT_ONCE = 1 << 22
"""Codes whose widths are in memory at a time."""


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
    if codes.numel() > MAX_CODES:
        return None
    height, length = codes.shape
    parts = codes.split(max(1, _AT_ONCE // max(length, 1)))
    most = int(code_widths(torch.stack(codes.aminmax())).max())
    counts = torch.cat([_count_widths(part, most) for part in parts])  # (height, most + 1)
    wider = length - counts.cumsum(1)  # codes of a row that need more than w bits, by w
    bits = torch.arange(most + 1, device=codes.device) * length + wider * _WIDE_BITS
    least, chosen = bits[:, 1:].min(1)
    chosen = chosen + 1
    rows = {int(width): (chosen == width).nonzero().flatten() for width in chosen.unique()}
    taken = int(least.sum()) + (len(rows) > 1) * height * _ROW_BITS + len(rows) * _NODE_BITS
    has_wide = bool((wider.gather(1, chosen[:, None]) > 0).any())
    taken += 3 * _NODE_BITS if has_wide else 0
    if taken >= most * codes.numel():
        return None
    return Split(rows, _wide_positions(parts, chosen) if has_wide else codes.new_zeros(0, dtype=torch.int64))


def _count_widths(codes: Tensor, most: int) -> Tensor:
    """How many codes of each row need 0 to `most` bits."""
    places = torch.arange(len(codes), device=codes.device)[:, None] * (most + 1) + code_widths(codes)
    counts = torch.bincount(places.flatten(), minlength=len(codes) * (most + 1))
    return counts.reshape(len(codes), most + 1)


def _wide_positions(parts: Sequence[Tensor], chosen: Tensor) -> Tensor:
    """Flat positions of codes wider than their row, and a few more where these would lie too far apart."""
    found, start, row = [], 0, 0
    for part in parts:
        wide = code_widths(part) > chosen[row : row + len(part), None]
        found.append(wide.flatten().nonzero().flatten() + start)
        start, row = start + part.numel(), row + len(part)
    if start > MAX_DISTANCE:
        found.append(torch.arange(0, start, MAX_DISTANCE // 2, device=chosen.device))
    places: Tensor = torch.cat(found).unique()
    return places


def code_widths(codes: Tensor) -> Tensor:
    """The bits each signed code needs.

    >>> code_widths(torch.tensor([0, -1, 1, -2, 2, -3, 127, -128, 128])).tolist()
    [1, 1, 2, 2, 3, 3, 8, 8, 9]
    """
    size = torch.where(codes < 0, -codes.int() - 1, codes.int())
    return torch.frexp(size.double()).exponent.long() + 1
