"""The phases of a compression and their usual shares of its time: the one place where these numbers are.

Measured on a CPU with random weights: ResNet18 and MobileNetV2 from the weights alone, MobileNetV2 with calibration
data. Not measured on a GPU.
"""

from __future__ import annotations

from math import isqrt

from factorpack.calibration.matched_inputs import MAKING_INPUTS
from factorpack.calibration.sampled_texts import WRITING_TEXTS

Phases = list[tuple[str, float]]

WEIGHTS_ALONE: Phases = [("planning", 0.42), ("compressing", 0.52), ("saving", 0.06)]
MEASURING: Phases = [("measuring", 0.03)]
CALIBRATED: Phases = [("planning", 0.37), ("refining", 0.15), ("compressing", 0.43)]
SAVING: Phases = [("saving", 0.02)]
SYNTHETIC: Phases = [(MAKING_INPUTS, 1.0), (WRITING_TEXTS, 0.3)]
"""Beside a calibrated budget, which is 1."""
VALUES_PER_WEIGHT = 80_000
"""What coding a weight alone takes beside its values, in values."""
ROOT_PER_LAYER = 300
"""What passes through a layer take, where the square root of its weight's values counts."""
BY_METHOD: Phases = [("compressing", 0.95), ("saving", 0.05)]


def phases_of(tries: int, is_calibrated: bool, is_synthetic: bool) -> Phases:
    """The phases that a call of `compress` goes through, at most: to a budget in so many tries, by a method in 0."""
    made = SYNTHETIC if is_synthetic else []
    if not tries:
        return [*made, *BY_METHOD]
    if not is_calibrated:
        return WEIGHTS_ALONE
    return [*made, *MEASURING, *(tries * CALIBRATED), *SAVING]


def planning_work(numel: int, is_calibrated: bool) -> int:
    """What planning a weight takes, in units that a bar counts: large weights are planned on some of their rows."""
    return isqrt(numel) + (ROOT_PER_LAYER if is_calibrated else 0)


def coding_work(numel: int, is_calibrated: bool) -> int:
    """What coding a weight takes, in units that a bar counts."""
    return planning_work(numel, True) if is_calibrated else numel + VALUES_PER_WEIGHT
