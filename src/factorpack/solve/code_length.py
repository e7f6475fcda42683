"""Code lengths for rate-distortion rounding: the bits each code will take once entropy coded.

Each class of codes has its own model. The class of an element is the sum of its row's and its column's class:
their magnitudes on a logarithmic scale, as in format/entropy.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

CLASSES = 24
REACH = 64
"""Codes beyond +-REACH are rounded to nearest: that far out, neighbours cost about the same."""
WIDTH = 2 * REACH + 3
BLOCK_ELEMENTS = 1 << 22
HIGH_RATE = 0.11552453009332421
"""ln 2 / 6: the squared error worth one bit at high rate, in squared steps."""


@dataclass(frozen=True, slots=True, eq=False)
class CodeLengths:
    """Rounds to the code that minimises (v - q)^2 + price * bits(q)."""

    table: Tensor
    """Bits of each code from -REACH to REACH, by class: (batch, CLASSES, 2 * REACH + 1)."""
    row_class: Tensor
    """(batch, rows), and (batch, columns): an element's class is their sum, clamped."""
    column_class: Tensor
    price: float
    """The price of one bit, in squared steps."""
    gains: Tensor = field(init=False)
    """Bits saved by the neighbour closer to zero, from -REACH - 1 to REACH + 1: (batch, CLASSES * WIDTH)."""

    def __post_init__(self) -> None:
        rise = self.table.diff(dim=2)
        gains = torch.zeros(*self.table.shape[:2], WIDTH, dtype=self.table.dtype, device=self.table.device)
        gains[:, :, 1 : REACH + 1] = -rise[:, :, :REACH]
        gains[:, :, REACH + 2 : -1] = rise[:, :, REACH:]
        object.__setattr__(self, "gains", gains.flatten(1))

    def __call__(self, column: int, values: Tensor) -> Tensor:
        classes = self.row_class + self.column_class[:, column, None]
        return self._round_cheaply(values.reshape(classes.shape), classes).reshape(values.shape)

    def round_all(self, values: Tensor) -> Tensor:
        """Rounds all columns at once, (batch, rows, columns), without feedback."""
        codes = torch.empty_like(values)
        for rows in _row_blocks(values):
            classes = self.row_class[:, rows, None] + self.column_class[:, None, :]
            codes[:, rows] = self._round_cheaply(values[:, rows], classes)
        return codes

    def _round_cheaply(self, values: Tensor, classes: Tensor) -> Tensor:
        """The nearest code, or its neighbour closer to zero: no other code can be cheaper in practice."""
        near = values.round()
        index = classes.clamp_(0, CLASSES - 1).mul_(WIDTH).add_(REACH + 1)
        index += near.clamp(-REACH - 1, REACH + 1).long()
        gain = self.gains.gather(1, index.flatten(1)).view(near.shape)
        side = near.sign()
        # (v - q + side)^2 - (v - q)^2 = 1 + 2 side (v - q)
        worse = 1.0 + 2.0 * side * (values - near)
        return torch.where(worse < self.price * gain, near - side, near)

    def by_group(self, groups: int) -> CodeLengths:
        """The same code lengths for a batch whose rows are split into groups, each its own batch element."""
        if groups == 1:
            return self
        return CodeLengths(
            self.table.repeat_interleave(groups, 0),
            self.row_class.reshape(len(self.row_class) * groups, -1),
            self.column_class.repeat_interleave(groups, 0),
            self.price,
        )


def free_lengths(batch: int, rows: int, columns: int, device: torch.device) -> CodeLengths:
    """Codes that all take nothing, so that values are rounded to the nearest."""
    table = torch.zeros(batch, CLASSES, 2 * REACH + 1, device=device)
    classes = torch.zeros(batch, max(rows, columns), dtype=torch.long, device=device)
    return CodeLengths(table, classes[:, :rows], classes[:, :columns], 0.0)


def fit_lengths(values: Tensor, price: float = HIGH_RATE) -> CodeLengths:
    """Fits code lengths to (batch, rows, columns) values in units of the step."""
    size = values.abs()
    rows, columns = _half_octaves(size.mean(2)), _half_octaves(size.mean(1))
    middle = _half_octaves(size.mean((1, 2)))
    row_class = (rows - middle[:, None]).round().long() + CLASSES // 2
    column_class = (columns - middle[:, None]).round().long()
    first = CodeLengths(_bits_table(values.round(), row_class, column_class), row_class, column_class, price)
    table = _bits_table(first.round_all(values), row_class, column_class)
    return CodeLengths(table, row_class, column_class, price)


def _row_blocks(values: Tensor) -> Iterator[slice]:
    """Blocks of rows of (batch, rows, columns), so that memory does not grow with the weight."""
    many = max(1, BLOCK_ELEMENTS // max(values.shape[0] * values.shape[2], 1))
    for start in range(0, values.shape[1], many):
        yield slice(start, start + many)


def _half_octaves(size: Tensor) -> Tensor:
    """Magnitude on a scale of half octaves."""
    return 2.0 * torch.log2(size.clamp_min(1e-4))


def _bits_table(codes: Tensor, row_class: Tensor, column_class: Tensor) -> Tensor:
    """Code lengths from counts per class, with a Laplacian prior of the class's mean magnitude."""
    batch, width = len(codes), 2 * REACH + 1
    counted = torch.zeros(batch * CLASSES * width, dtype=torch.long, device=codes.device)
    first = torch.arange(batch, device=codes.device)[:, None, None] * CLASSES
    for rows in _row_blocks(codes):
        classes = (row_class[:, rows, None] + column_class[:, None, :]).clamp_(0, CLASSES - 1)
        index = classes.add_(first).mul_(width).add_(REACH)
        index += codes[:, rows].clamp(-REACH, REACH).long()
        counted += torch.bincount(index.flatten(), minlength=len(counted))
    counts = counted.to(codes.dtype).reshape(batch, CLASSES, width)
    spots = torch.arange(-REACH, REACH + 1, device=codes.device, dtype=codes.dtype)
    return bits_of_counts(counts, spots.abs(), torch.ones_like(spots))


def bits_of_counts(counts: Tensor, sizes: Tensor, ways: Tensor) -> Tensor:
    """Bits per code from counts, (..., codes), of codes with magnitudes `sizes`; each counts `ways` equal codes."""
    total = counts.sum(-1, keepdim=True)
    mean = ((counts * sizes).sum(-1, keepdim=True) + 0.05) / (total + 1.0)
    # The two-sided geometric distribution with this mean magnitude.
    decay = (torch.sqrt(1 + mean.square()) - 1) / mean
    prior = ways * decay.pow(sizes) * (1 - decay) / (1 + decay)
    weight = 8.0
    return ways.log2() - torch.log2(((counts + weight * prior) / (total + weight)).clamp_min(2.0**-24))
