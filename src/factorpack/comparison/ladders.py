"""The best settings within a byte limit: the highest rung of each ladder that fits, then the most accurate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Settings = TypeVar("Settings")


class Ladders(Generic[Settings]):
    """Ladders of one method's settings, with the measurements made so far.

    `measure` takes settings to the size of their file in bytes, and the error of its weights.
    """

    def __init__(
        self, ladders: Sequence[Sequence[Settings]], measure: Callable[[Settings], tuple[int, float]]
    ) -> None:
        self._ladders, self._measure = ladders, measure
        self._known: dict[tuple[int, int], tuple[int, float]] = {}

    def best_within(self, max_bytes: int) -> Settings | None:
        """The most accurate among each ladder's largest file of at most `max_bytes`; None if none fits."""
        rungs = {
            number: rung
            for number, ladder in enumerate(self._ladders)
            if (rung := self._highest(number, len(ladder), max_bytes)) is not None
        }
        if not rungs:
            return None
        best = min(rungs, key=lambda number: self._measure_rung(number, rungs[number])[1])
        return self._ladders[best][rungs[best]]

    def smallest(self) -> int:
        """Bytes of the smallest possible file."""
        return min(self._measure_rung(number, 0)[0] for number in range(len(self._ladders)))

    def _highest(self, number: int, rungs: int, max_bytes: int) -> int | None:
        """Bisects, as files grow along a ladder."""
        low, high = -1, rungs
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self._measure_rung(number, middle)[0] <= max_bytes else (low, middle)
            )
        return low if low >= 0 else None

    def _measure_rung(self, number: int, rung: int) -> tuple[int, float]:
        if (number, rung) not in self._known:
            self._known[number, rung] = self._measure(self._ladders[number][rung])
        return self._known[number, rung]
