"""The rate term: a differentiable estimate of the bits that the codes take in a file.

A code q takes L[q] bits, from the histogram of its table's codes; a real value between two codes takes the
linear interpolation of theirs. The gradient pulls values towards cheaper codes, and scales upwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.quantize.straight_through import straight_through
from factorpack.quantize.uniform import code_range
from factorpack.tune.trainable import QuantizedRows

MAX_TABLES = 32
_CODES_PER_SYMBOL = 16
"""A table needs at least this many codes per symbol."""
_UNSEEN = 0.5
"""A code that does not occur counts as half an occurrence."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthTable:
    """Bits per code, (g, symbols), rising away from each table's cheapest code; and each row's table, (r,)."""

    lengths: Tensor
    group_of: Tensor
    low: int

    def at(self, unit: Tensor) -> Tensor:
        """Bits of real values (r, n), linear between codes. Beyond the range the slope still points back."""
        symbols = self.lengths.shape[1]
        with torch.no_grad():
            clamped = unit.clamp(self.low, self.low + symbols - 1)
            below = clamped.floor().clamp(max=self.low + symbols - 2)
            index = (below - self.low).long() + symbols * self.group_of[:, None]
            first = self.lengths.take(index)
            slope = self.lengths.take(index + 1) - first
        return first + slope * (straight_through(unit, clamped) - below)

    def cheaper(self, codes: Tensor) -> Tensor:
        """Each code's neighbour towards the cheapest code, or the code itself."""
        cheapest = (self.lengths.argmin(1) + self.low)[self.group_of][:, None]
        return codes + (cheapest - codes).sign()


def fit_table(codes: Tensor, bits: int) -> tuple[LengthTable, Tensor]:
    """Tables for codes (r, n) of a bit width, and the codes' empirical entropy in bits within their groups."""
    low, high = code_range(bits)
    group_of = _groups(codes, high - low + 1)
    counts = _histograms(codes, group_of, low, high)
    total = counts.sum(1, keepdim=True)
    entropy = -(counts * (counts / total).clamp_min(1e-300).log2()).sum()
    smooth = _smooth(counts).clamp_min(_UNSEEN)
    lengths = _make_monotone(-(smooth / total).log2())
    return LengthTable(lengths.float(), group_of, low), entropy


def _groups(codes: Tensor, symbols: int) -> Tensor:
    """Rows with codes of similar magnitude share a table, as similar rows do in the file."""
    rows = codes.shape[0]
    most = rows if rows <= MAX_TABLES else MAX_TABLES // 2
    groups = max(min(most, codes.numel() // (_CODES_PER_SYMBOL * symbols)), 1)
    order = codes.float().abs().mean(1).argsort(stable=True)
    group_of = torch.empty_like(order)
    group_of[order] = torch.arange(rows, device=codes.device) * groups // rows
    return group_of


def _histograms(codes: Tensor, group_of: Tensor, low: int, high: int) -> Tensor:
    symbols, groups = high - low + 1, int(group_of.max()) + 1
    flat = codes.long() - low + symbols * group_of[:, None]
    counts = torch.bincount(flat.reshape(-1), minlength=groups * symbols)
    return counts.reshape(groups, symbols).double()


def _smooth(counts: Tensor) -> Tensor:
    """Means over windows of a quarter standard deviation each way; no smoothing if codes are few and coarse."""
    symbols = counts.shape[1]
    position = torch.arange(symbols, device=counts.device)
    share = counts / counts.sum(1, keepdim=True)
    mean = (share * position).sum(1, keepdim=True)
    deviation = (share * (position - mean).square()).sum(1, keepdim=True).sqrt()
    reach = (deviation / 4).long()
    first, last = (position - reach).clamp_min(0), (position + reach).clamp_max(symbols - 1)
    sums = nn.functional.pad(counts.cumsum(1), (1, 0))
    return (sums.gather(1, last + 1) - sums.gather(1, first)) / (last + 1 - first)


def _make_monotone(lengths: Tensor) -> Tensor:
    """Makes lengths rise away from each table's cheapest code, by at least 2^-bits per code.

    A code costs as much as the cheapest one further out: a gap in a histogram is no barrier.
    """
    symbols = lengths.shape[1]
    cheapest = lengths.argmin(1, keepdim=True)
    offset = torch.arange(symbols, device=lengths.device) - cheapest
    to_the_right = lengths.flip(1).cummin(1).values.flip(1)
    monotone = torch.where(offset >= 0, to_the_right, lengths.cummin(1).values)
    steps = monotone.diff(dim=1).abs().clamp_min(1 / symbols)
    up = (nn.functional.pad(steps, (1, 0)) * (offset > 0)).cumsum(1)
    down = (nn.functional.pad(steps, (0, 1)) * (offset < 0)).flip(1).cumsum(1).flip(1)
    return lengths.gather(1, cheapest) + up + down


class RateTerm:
    """The code length of all of a model's codes, in bits per weight; `refresh` fits it to the current codes."""

    def __init__(self, rows: Sequence[QuantizedRows], weights: int) -> None:
        self.rows, self.weights = rows, max(weights, 1)
        self.tables: list[LengthTable] = []
        self.refresh()

    def refresh(self) -> float:
        """Fits the tables to the current codes and returns their entropy in bits."""
        with torch.no_grad():
            fitted = [fit_table(rows.codes(), rows.bits) for rows in self.rows]
        self.tables = [table for table, _ in fitted]
        return sum(entropy.item() for _, entropy in fitted)

    def __call__(self) -> Tensor:
        bits = [table.at(rows.unit()).sum() for rows, table in zip(self.rows, self.tables, strict=True)]
        return torch.stack(bits).sum() / self.weights if bits else torch.zeros(())

    def state(self) -> list[list[Any]]:
        """For a checkpoint: the tables of the last refresh, which later codes cannot reproduce."""
        return [[table.lengths.cpu(), table.group_of.cpu(), table.low] for table in self.tables]

    def load(self, state: list[list[Any]]) -> None:
        device = [rows.numbers.device for rows in self.rows]
        self.tables = [
            LengthTable(lengths.to(where), group_of.to(where), int(low))
            for (lengths, group_of, low), where in zip(state, device, strict=True)
        ]


def quantized_rows(model: nn.Module) -> list[QuantizedRows]:
    return [module for module in model.modules() if isinstance(module, QuantizedRows)]
