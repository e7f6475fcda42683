"""Which dimensions of which tensors must be permuted alike: union-find over groups of channels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor: the channels of a group in their order, each `repeat` numbers long.

    A (C, h, w) picture flattened to C * h * w numbers has the repeat h * w.
    """

    group: int
    repeat: int = 1

    def times(self, count: int) -> Axis:
        return Axis(self.group, self.repeat * count)


class Ties:
    """Groups of channels that merge as dimensions are found to be one, and freeze where they may not move."""

    def __init__(self) -> None:
        self._parents: list[Axis] = []
        self._sizes: list[int] = []
        self._frozen: list[str] = []

    def fresh(self, size: int, frozen: str = "") -> Axis:
        """A dimension tied to nothing yet; `frozen` says why it may never move."""
        self._parents.append(Axis(len(self._parents)))
        self._sizes.append(size)
        self._frozen.append(frozen)
        return self._parents[-1]

    def resolve(self, axis: Axis) -> Axis:
        """The same dimension in terms of the group that its group has become part of."""
        parent = self._parents[axis.group]
        while parent.group != axis.group:
            axis = parent.times(axis.repeat)
            parent = self._parents[axis.group]
        return axis

    def size(self, axis: Axis) -> int:
        """Numbers along the dimension."""
        return self._sizes[axis.group] * axis.repeat

    def frozen(self, axis: Axis) -> str:
        """Why the channels may not move, or nothing where they may."""
        return self._frozen[self.resolve(axis).group]

    def freeze(self, axis: Axis, reason: str) -> None:
        root = self.resolve(axis).group
        self._frozen[root] = self._frozen[root] or reason

    def tie(self, one: Axis, other: Axis) -> None:
        """Both dimensions are permuted alike from now on, in the longer of their two runs of numbers."""
        fine, coarse = sorted((self.resolve(one), self.resolve(other)), key=lambda axis: axis.repeat)
        if self.size(fine) != self.size(coarse) or coarse.repeat % fine.repeat:
            for axis in (fine, coarse):
                self.freeze(axis, f"runs of {fine.repeat} and {coarse.repeat} numbers do not fit")
        elif fine.group != coarse.group:
            self._parents[fine.group] = Axis(coarse.group, coarse.repeat // fine.repeat)
            self.freeze(coarse, self._frozen[fine.group])
