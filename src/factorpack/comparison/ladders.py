"""Which settings do best within a number of bytes: the highest rung of each ladder, then the closest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from factorpack.methods import Method

Measure = Callable[[Method], tuple[int, float]]
"""Settings -> the bytes of their file, and the error of its weights."""


class Ladders:
    """Ladders of one method, and what has been measured on them so far."""

    def __init__(self, ladders: Sequence[Sequence[Method]], measure: Measure) -> None:
        self._ladders, self._measure = ladders, measure
        self._known: dict[tuple[int, int], tuple[int, float]] = {}

    def within(self, max_bytes: int) -> Method | None:
        """Of each ladder's largest file of at most `max_bytes`, the closest; None if there is none."""
        rungs = {
            number: rung
            for number, ladder in enumerate(self._ladders)
            if (rung := self._highest(number, len(ladder), max_bytes)) is not None
        }
        if not rungs:
            return None
        best = min(rungs, key=lambda number: self._found(number, rungs[number])[1])
        return self._ladders[best][rungs[best]]

    def smallest(self) -> int:
        """Bytes of the smallest file there is."""
        return min(self._found(number, 0)[0] for number in range(len(self._ladders)))

    def _highest(self, number: int, rungs: int, max_bytes: int) -> int | None:
        """Bisection, because files grow along a ladder."""
        low, high = -1, rungs
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._found(number, middle)[0] <= max_bytes else (low, middle)
        return low if low >= 0 else None

    def _found(self, number: int, rung: int) -> tuple[int, float]:
        if (number, rung) not in self._known:
            self._known[number, rung] = self._measure(self._ladders[number][rung])
        return self._known[number, rung]
