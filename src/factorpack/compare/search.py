"""Which rung of a ladder makes the largest file within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from factorpack.methods import Method

SizeOf = Callable[[Method], int]


class Ladders:
    """Ladders of one method, and the sizes found on them so far."""

    def __init__(self, ladders: Sequence[Sequence[Method]], size_of: SizeOf) -> None:
        self._ladders, self._size_of = ladders, size_of
        self._known: dict[tuple[int, int], int] = {}

    def within(self, max_bytes: int) -> Method | None:
        """The setting with the largest file of at most `max_bytes`, over all ladders; None if there is none."""
        best: tuple[int, Method] | None = None
        for number, ladder in enumerate(self._ladders):
            rung = self._highest(number, len(ladder), max_bytes)
            if rung is not None and (best is None or self._size(number, rung) > best[0]):
                best = self._size(number, rung), ladder[rung]
        return None if best is None else best[1]

    def smallest(self) -> int:
        """Bytes of the smallest file there is."""
        return min(self._size(number, 0) for number in range(len(self._ladders)))

    def _highest(self, number: int, rungs: int, max_bytes: int) -> int | None:
        """Bisection, because files grow along a ladder."""
        low, high = -1, rungs
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._size(number, middle) <= max_bytes else (low, middle)
        return low if low >= 0 else None

    def _size(self, number: int, rung: int) -> int:
        if (number, rung) not in self._known:
            self._known[number, rung] = self._size_of(self._ladders[number][rung])
        return self._known[number, rung]
