"""Curves corrected by what was measured of each weight alone, and plans on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log2, sqrt
from statistics import mean

from factorpack.budget.curves import Curve, allocate, fill_unknown, least_budget

LEAST, LARGEST = 1 / 4, 64.0
"""A loss is multiplied by no less and no more. A few inputs do not show that a weight hardly matters; but where a
layer is nearly lost, it does far more to the outputs than its sensitivity says."""
FAR = 2.0
"""Octaves between two measured steps from which half of the change between their factors counts."""
SETTLING, SETTLED = 8, 1.01
"""How often a plan is made again with the corrections at its own steps, unless they change by less than this factor."""


class Corrections:
    """What losses are multiplied by: at the step that was measured last, what was found there.

    From there it changes with the step as it did between the measured steps, up to those: fully if they are far
    apart, hardly if they are so near that the change is chance.
    """

    def __init__(self, curves: Mapping[str, Curve], known: Mapping[str, float]) -> None:
        """`known` are the weights of known sensitivity; the others take the median step."""
        self._curves, self._known = dict(curves), known
        self._found: dict[str, list[tuple[float, float]]] = {name: [] for name in curves}
        """For each weight octaves of steps and of factors, as they were measured."""
        self._factors = dict.fromkeys(curves, 1.0)
        """Those at the steps of the last plan."""

    def add(self, name: str, place: int, measured: float) -> None:
        """The loss that was measured at a step of a weight's curve."""
        curve = self._curves[name]
        predicted = curve.losses[place]
        if predicted > 0 and measured > 0:
            factor = min(max(measured / predicted, LEAST), LARGEST)
            self._found[name].append((log2(curve.steps[place]), log2(factor)))

    def factor_at(self, name: str, step: float) -> float:
        """What a weight's loss at a step is multiplied by."""
        found = self._found[name]
        if not found:
            return 1.0
        octaves, factors = zip(*found, strict=True)
        middle, average = mean(octaves), mean(factors)
        spread = sum((octave - middle) ** 2 for octave in octaves)
        rise = sum((octave - middle) * (factor - average) for octave, factor in found)
        nearest = min(max(log2(step), min(octaves)), max(octaves))
        return float(2 ** (factors[-1] + rise / (spread + FAR**2 / 2) * (nearest - octaves[-1])))

    def plan(self, budget: float) -> dict[str, float]:
        """Steps of equal slope with the corrections that hold at these very steps."""
        budget = max(budget, least_budget(self._curves))
        for _ in range(SETTLING):
            steps = allocate(self.curves(), budget)
            wanted = {name: self.factor_at(name, step) for name, step in steps.items()}
            changes = {name: wanted[name] / self._factors[name] for name in wanted}
            # Half-way where it depends on the step, or steps would leap back and forth.
            for name, change in changes.items():
                self._factors[name] *= change if len(self._found[name]) < 2 else sqrt(change)
            if all(1 / SETTLED < change < SETTLED for change in changes.values()):
                break
        return steps

    def curves(self) -> dict[str, Curve]:
        """All curves, corrected."""
        corrected = {
            name: replace(
                curve,
                losses=[
                    loss * self.factor_at(name, step)
                    for loss, step in zip(curve.losses, curve.steps, strict=True)
                ],
                step_at_unit_slope=curve.step_at_unit_slope / sqrt(self._factors[name]),
            )
            for name, curve in self._curves.items()
        }
        return fill_unknown(corrected, self._known)
