"""Searching for the step, or the price, at which a weight takes a given number of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2, sqrt
from typing import Generic, TypeVar

T = TypeVar("T")


class StepSearch:
    """Secant steps on the logarithm of a setting whose bytes fall as it grows, kept within known bounds."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.known: list[tuple[float, int]] = []
        """Settings tried, and the bytes they gave."""
        self.low: float | None = None
        """The largest setting known to give too many bytes, and the smallest to give too few."""
        self.high: float | None = None

    def next_after(self, number: float, size: int, wanted: float) -> float:
        """What to try next, after `number` gave `size` bytes where `wanted` are needed."""
        guess = number * self.factor(size, wanted, number)
        self.known.append((number, size))
        if size > wanted:
            self.low = number if self.low is None else max(self.low, number)
        else:
            self.high = number if self.high is None else min(self.high, number)
        if self.low is not None and self.high is not None and not self.low < guess < self.high:
            guess = sqrt(self.low * self.high)
        return guess

    def finest(self, number: float) -> float:
        """The largest setting known to give too many bytes; `number` where there is none."""
        return self.low if self.low is not None else number

    def factor(self, size: float, wanted: float, number: float | None = None) -> float:
        """What to multiply a setting by that gives, or is expected to give, `size` bytes."""
        slope = -max(self.numel / 8, 1.0)  # bytes an octave, where steps are fine
        if size < self.numel / 8:  # coarse steps: about a bit of every code that is not zero
            slope = -max(0.6 * size, 1.0)
        if number is not None and self.known and self.known[-1][0] != number and self.known[-1][1] != size:
            before, then = self.known[-1]
            slope = min((size - then) / log2(number / before), -0.05 * self.numel / 8)
        return float(2.0 ** max(-1.5, min(1.5, (wanted - size) / slope)))


class GapSearch:
    """The step, then the price, of the one weight that closes the gap to a budget.

    Bytes may fall in stairs as the step grows; the price of its bits then decides.
    """

    BY_STEP = 8

    def __init__(self, numel: int, step: float, price: float) -> None:
        self.step, self.price = step, price
        self._numel, self._search, self._tries = numel, StepSearch(numel), 0

    def move(self, size: int, wanted: float) -> None:
        """Moves on, after the weight took `size` bytes where `wanted` are needed."""
        if self._tries < self.BY_STEP:
            self.step = self._search.next_after(self.step, size, wanted)
        else:
            price = max(self.price, 0.01)
            if self._tries == self.BY_STEP:
                self.step, self._search = self._search.finest(self.step), StepSearch(self._numel)
                self._search.known.append((price, size))
            self.price = self._search.next_after(price, size, wanted)
        self._tries += 1


@dataclass(slots=True)
class BestFit(Generic[T]):
    """The largest file found within a budget: its bytes, and its tensors by name."""

    size: int = 0
    tensors: Mapping[str, T] = field(default_factory=dict)

    def offer(self, max_bytes: int, size: int, tensors: Mapping[str, T]) -> None:
        if self.size < size <= max_bytes:
            self.size, self.tensors = size, dict(tensors)
