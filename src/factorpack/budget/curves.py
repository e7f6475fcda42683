"""Rate-distortion curves: bytes and loss of each weight at rising steps, and steps of equal slope."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2, sqrt
from pathlib import Path

from factorpack.errors import FormatError, PlanError, SourceError
from factorpack.format.checked_file import read_checked_json, write_checked_json


@dataclass(frozen=True, slots=True)
class Curve:
    """One weight, from fine steps to coarse ones."""

    steps: Sequence[float]
    bytes: Sequence[int]
    losses: Sequence[float]
    """Nats of divergence from the original's predictions, by the sensitivity; relative squared weight error
    without calibration data."""
    numel: int
    tile: int
    step_at_unit_slope: float
    """Steps of equal slope across weights are this times one number for the whole model."""
    trellis: int = 0
    """States of the trellis its codes follow; steps are those of plain codes with equal error."""
    price: float | None = None
    """What a bit is worth in rounding, in squared steps; None: what the planner says."""

    def bytes_at(self, step: float) -> float:
        """Interpolated. Below the finest step, halving it costs one bit per weight."""
        if step <= self.steps[0]:
            return self.bytes[0] + self.numel / 8 * log2(self.steps[0] / step)
        if step >= self.steps[-1]:
            return self.bytes[-1]
        right = bisect_left(self.steps, step)
        share = log2(step / self.steps[right - 1]) / log2(self.steps[right] / self.steps[right - 1])
        return self.bytes[right - 1] + share * (self.bytes[right] - self.bytes[right - 1])

    def loss_at(self, step: float) -> float:
        """Interpolated between powers of the step. Below the finest step, the loss falls with its square."""
        first, last = self.steps[0], self.steps[-1]
        if step <= first:
            return self.losses[0] * (step / first) ** 2
        if step >= last:
            return self.losses[-1]
        right = bisect_left(self.steps, step)
        share = log2(step / self.steps[right - 1]) / log2(self.steps[right] / self.steps[right - 1])
        below, above = self.losses[right - 1], self.losses[right]
        if not (below > 0 and above > 0):
            return below + share * (above - below)
        return float(below * (above / below) ** share)

    def nearest(self, step: float) -> int:
        """The index of the step on the curve that is nearest in octaves."""
        return min(range(len(self.steps)), key=lambda place: abs(log2(self.steps[place] / step)))


def least_budget(curves: Mapping[str, Curve]) -> float:
    """The bytes with every code zero, and a little more: the least that `allocate` takes."""
    return 1.01 * sum(curve.bytes[-1] for curve in curves.values())


def allocate(curves: Mapping[str, Curve], budget: float) -> dict[str, float]:
    """A step for every weight, of equal slope, so that the bytes together meet the budget."""

    def total(multiplier: float) -> float:
        return sum(curve.bytes_at(curve.step_at_unit_slope * multiplier) for curve in curves.values())

    # From 2^-40 of the finest step of any curve to the coarsest of any.
    low = min(curve.steps[0] / curve.step_at_unit_slope for curve in curves.values()) * 2.0**-40
    high = max(curve.steps[-1] / curve.step_at_unit_slope for curve in curves.values())
    if total(high) > budget:
        raise PlanError(
            f"the weights take {total(high):.0f} bytes at least, and {budget:.0f} are left for them"
        )
    for _ in range(120):
        middle = sqrt(low * high)
        before = low, high
        low, high = (middle, high) if total(middle) > budget else (low, middle)
        if (low, high) == before:  # there is no number between them
            break
    return {name: curve.step_at_unit_slope * high for name, curve in curves.items()}


def fill_unknown(curves: dict[str, Curve], known: Mapping[str, float]) -> dict[str, Curve]:
    """Weights of unknown sensitivity take the median layer's: the same step relative to their RMS."""
    if not known:
        return curves
    ratios = sorted(curves[name].step_at_unit_slope / curves[name].steps[0] for name in known)
    middle = ratios[len(ratios) // 2]
    return {
        name: one if name in known else replace(one, step_at_unit_slope=middle * one.steps[0])
        for name, one in curves.items()
    }


def save_curves(path: Path, curves: Mapping[str, Curve], fingerprint: str) -> None:
    """Writes curves as JSON, for people to look at and for the next compression to plan on."""
    found = {name: asdict(curve) for name, curve in curves.items()}
    write_checked_json(path, {"fingerprint": fingerprint, "curves": found})


def load_curves(path: Path, fingerprint: str | None = None) -> dict[str, Curve] | None:
    """Curves of this very model, data and planner; None where the file has others, or is not there.

    Without a fingerprint, to look at: curves of whatever is in the file. Damaged ones are a FormatError.
    """
    try:
        document = read_checked_json(path)
        if fingerprint not in (None, document["fingerprint"]):
            return None
        return {name: Curve(**fields) for name, fields in document["curves"].items()}
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (OSError, SourceError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} holds no curves: {error}; remove it or name another file") from error
