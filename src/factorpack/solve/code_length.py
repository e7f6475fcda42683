"""Code lengths while rounding: what a code will cost once entropy coded, so that rounding can weigh it.

Codes are coded with a model a class, and the class of an entry is the sum of its row's and its column's:
their magnitudes on a logarithmic scale. That is how format/entropy.py models them too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLASSES = 24
REACH = 64
"""Codes beyond +-REACH are priced like REACH, with two bits more for each doubling."""
HIGH_RATE = 0.11552453009332421
"""ln 2 / 6: bits buy squared error at this price, in squared steps, where steps are fine."""


@dataclass(frozen=True, slots=True, eq=False)
class CodeLengths:
    """A rounding that picks the code with the least (v - q)^2 + price * bits(q)."""

    table: Tensor
    """Bits of each code from -REACH to REACH, by class: (batch, CLASSES, 2 * REACH + 1)."""
    row_class: Tensor
    """(batch, rows), and (batch, columns): an entry's class is their sum, clamped."""
    column_class: Tensor
    price: float
    """What a bit is worth, in squared steps."""

    def __call__(self, column: int, values: Tensor) -> Tensor:
        classes = (self.row_class + self.column_class[:, column, None]).clamp_(0, CLASSES - 1)
        return _shrunk(values, self.table, self.price, classes)

    def all(self, values: Tensor) -> Tensor:
        """Every column at once, (batch, rows, columns): for rounding without feedback."""
        classes = (self.row_class[:, :, None] + self.column_class[:, None, :]).clamp_(0, CLASSES - 1)
        return _shrunk(values, self.table, self.price, classes)

    def by_group(self, groups: int) -> CodeLengths:
        """The same prices for a batch whose rows are split into groups, each an element of its own."""
        if groups == 1:
            return self
        return CodeLengths(
            self.table.repeat_interleave(groups, 0),
            self.row_class.reshape(len(self.row_class) * groups, -1),
            self.column_class.repeat_interleave(groups, 0),
            self.price,
        )


def fit_lengths(values: Tensor, price: float = HIGH_RATE, rounds: int = 2) -> CodeLengths:
    """Code lengths for (batch, rows, columns) numbers in units of the step, from the numbers themselves."""
    size = values.abs()
    rows, columns = _level(size.mean(2)), _level(size.mean(1))
    middle = _level(size.mean((1, 2)))
    row_class = (rows - middle[:, None]).round().long() + CLASSES // 2
    column_class = (columns - middle[:, None]).round().long()
    classes = (row_class[:, :, None] + column_class[:, None, :]).clamp_(0, CLASSES - 1)
    table = values.new_zeros(len(values), CLASSES, 2 * REACH + 1)
    lengths = CodeLengths(table, row_class, column_class, price)
    for _ in range(rounds):
        codes = _shrunk(values, lengths.table, price, classes)
        lengths = CodeLengths(_table(codes, classes), row_class, column_class, price)
    return lengths


def _level(size: Tensor) -> Tensor:
    """Half octaves."""
    return 2.0 * torch.log2(size.clamp_min(1e-4))


def _priced(codes: Tensor, table: Tensor, classes: Tensor) -> Tensor:
    index = classes * (2 * REACH + 1) + REACH + codes.clamp(-REACH, REACH).long()
    bits = table.flatten(1).gather(1, index.flatten(1)).reshape(codes.shape)
    return bits + 2.0 * (codes.abs() / REACH).clamp_min(1.0).log2()


def _shrunk(values: Tensor, table: Tensor, price: float, classes: Tensor) -> Tensor:
    """The cheaper of the nearest code and its neighbour nearer to zero, the other one worth a thought."""
    near = values.round()
    inner = near - torch.sign(near)
    gain = _priced(near, table, classes) - _priced(inner, table, classes)
    worse = (values - inner).square_() - (values - near).square_()
    return torch.where(worse < price * gain, inner, near)


def _table(codes: Tensor, classes: Tensor) -> Tensor:
    """Code lengths from counts: each class's own, leaning on a Laplacian of its spread where it is thin."""
    batch, width = len(codes), 2 * REACH + 1
    index = classes * width + REACH + codes.clamp(-REACH, REACH).long()
    counts = codes.new_zeros(batch, CLASSES * width)
    counts.scatter_add_(1, index.flatten(1), torch.ones_like(codes).flatten(1))
    counts = counts.reshape(batch, CLASSES, width)
    spots = torch.arange(-REACH, REACH + 1, device=codes.device, dtype=codes.dtype)
    total = counts.sum(2, keepdim=True)
    spread = ((counts * spots.abs()).sum(2, keepdim=True) + 0.05) / (total + 1.0)
    # The two-sided geometric law with this mean magnitude.
    decay = (torch.sqrt(1 + spread.square()) - 1) / spread
    prior = decay.pow(spots.abs()) * (1 - decay) / (1 + decay)
    weight = 8.0
    return -torch.log2(((counts + weight * prior) / (total + weight)).clamp_min(2.0**-24))
