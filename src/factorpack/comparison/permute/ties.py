"""Which dimensions of which tensors must be permuted together: union-find over groups of channels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor: a group's channels in order, each `repeat` elements long.

    A (C, h, w) image flattened to C * h * w elements has repeat h * w.
    """

    group: int
    repeat: int = 1

    def times(self, count: int) -> Axis:
        return Axis(self.group, self.repeat * count)


class Ties:
    """Groups of channels, merged when their dimensions must match and frozen when they may not move."""

    def __init__(self) -> None:
        self._parents: list[Axis] = []
        self._sizes: list[int] = []
        self._frozen: list[str] = []

    def fresh(self, size: int, frozen: str = "") -> Axis:
        """A new dimension, tied to nothing; `frozen` is the reason if it may never move."""
        self._parents.append(Axis(len(self._parents)))
        self._sizes.append(size)
        self._frozen.append(frozen)
        return self._parents[-1]

    def resolve(self, axis: Axis) -> Axis:
        """The same dimension in terms of the root group it was merged into."""
        parent = self._parents[axis.group]
        while parent.group != axis.group:
            axis = parent.times(axis.repeat)
            parent = self._parents[axis.group]
        return axis

    def size(self, axis: Axis) -> int:
        """Elements along the dimension."""
        return self._sizes[axis.group] * axis.repeat

    def frozen(self, axis: Axis) -> str:
        """Why the channels may not move; empty if they may."""
        return self._frozen[self.resolve(axis).group]

    def freeze(self, axis: Axis, reason: str) -> None:
        root = self.resolve(axis).group
        self._frozen[root] = self._frozen[root] or reason

    def tie(self, one: Axis, other: Axis) -> None:
        """Permutes both dimensions together from now on, in the longer of their two runs of elements."""
        fine, coarse = sorted((self.resolve(one), self.resolve(other)), key=lambda axis: axis.repeat)
        if self.size(fine) != self.size(coarse) or coarse.repeat % fine.repeat:
            for axis in (fine, coarse):
                self.freeze(axis, f"runs of {fine.repeat} and {coarse.repeat} elements do not align")
        elif fine.group != coarse.group:
            self._parents[fine.group] = Axis(coarse.group, coarse.repeat // fine.repeat)
            self.freeze(coarse, self._frozen[fine.group])
