"""The loop that meets a size: a method per weight of equal slope, then one weight closes the gap that is left.

How weights get their codes is a `Coder`'s: one after the other in this process (`sequential`), or as tasks of
an engine (`tasks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from factorpack.budget.curves import Curve, allocate, least_budget
from factorpack.budget.planner import Planner
from factorpack.budget.step_search import BestFit, GapSearch
from factorpack.methods import SecondOrder

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
AIM = 0.997
"""The share of a budget that is aimed at; between LEAST and 1 is good."""
LEAST = 0.991
CLOSING_TRIES = 16
PASSES = 3


class Coder(Protocol[T_co]):
    """Gives weights their codes, and knows the size of the file they would make."""

    @property
    def order(self) -> Sequence[str]:
        """The weights, in the order they are coded."""
        ...

    def encode(
        self, methods: Mapping[str, SecondOrder], planned: Mapping[str, float], aim: float, closer: str
    ) -> None:
        """Codes every weight anew, at about the bytes planned for it; `closer` may be changed later."""
        ...

    def numel(self, name: str) -> int: ...

    def step_of(self, name: str) -> float:
        """The step a weight was coded at."""
        ...

    def bytes_of(self, name: str) -> int:
        """Bytes of a weight's codes."""
        ...

    def recode(self, name: str, method: SecondOrder) -> None:
        """Gives the closer, and no other weight, new codes."""
        ...

    def zero(self, name: str) -> None:
        """Makes a weight zero."""
        ...

    def measure(self) -> tuple[int, Mapping[str, T_co]]:
        """Bytes of the file with all tensors as they are now, and those tensors in the file's order."""
        ...


def meet_size(
    coder: Coder[T], curves: Mapping[str, Curve], planner: Planner, max_bytes: int, overhead: int
) -> Mapping[str, T]:
    """The tensors of the largest file found of at most `max_bytes`."""
    least = least_budget(curves)
    # Weights that are zero lose nothing at any step: no smaller one spends the bytes.
    is_lossless = not any(curve.losses[-1] for curve in curves.values())
    wanted = least if is_lossless else AIM * max_bytes - overhead
    aim, best = wanted, BestFit[T]()
    for _ in range(PASSES):
        size = _pass(coder, curves, planner, max(aim, least), max_bytes, best)
        if best.size >= LEAST * max_bytes or (is_lossless and best.size):
            break
        # No single weight could make up for what was missed: aim lower, or higher, with all of them.
        aim *= max(wanted, 1.0) / max(size - overhead, 1.0)
    if not best.size:
        _zero_largest(coder, max_bytes, best)
    return best.tensors


def _pass(
    coder: Coder[T],
    curves: Mapping[str, Curve],
    planner: Planner,
    aim: float,
    max_bytes: int,
    best: BestFit[T],
) -> int:
    """Codes all weights at equal slope, then changes one until the file fits; returns the last file's size."""
    steps = allocate(curves, aim)
    planned = {name: curves[name].bytes_at(steps[name]) for name in coder.order}
    methods = {
        name: planner.method(steps[name], curves[name].tile, curves[name].trellis, curves[name].price)
        for name in coder.order
    }
    closer = _closer(planned, coder.order)
    coder.encode(methods, planned, aim, closer)
    gap = GapSearch(coder.numel(closer), coder.step_of(closer), methods[closer].price)
    for _ in range(CLOSING_TRIES):
        size, tensors = coder.measure()
        best.offer(max_bytes, size, tensors)
        if LEAST * max_bytes <= size <= max_bytes:
            break
        own = coder.bytes_of(closer)
        gap.move(own, own + AIM * max_bytes - size)
        coder.recode(closer, replace(methods[closer], step=gap.step, price=gap.price))
    return size


def _closer(planned: Mapping[str, float], order: Sequence[str]) -> str:
    """The last weight with a fair share of the bytes: changing it late disturbs least."""
    enough = 0.04 * sum(planned.values())
    return next(
        (name for name in reversed(order) if planned[name] >= enough), max(planned, key=lambda n: planned[n])
    )


def _zero_largest(coder: Coder[T], max_bytes: int, best: BestFit[T]) -> None:
    """The last resort of a budget barely above headers: the largest weights become zero."""
    for name in sorted(coder.order, key=lambda each: -coder.bytes_of(each)):
        coder.zero(name)
        best.offer(max_bytes, *coder.measure())
        if best.size:
            return
