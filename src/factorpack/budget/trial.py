"""What one compressed weight alone does to a model's outputs: measured, not predicted."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from factorpack.batches import forward
from factorpack.budget.curves import Curve
from factorpack.budget.divergence import divergence_of
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.calibrate import Calibration
from factorpack.decoding import decode
from factorpack.record import Encoded

LARGEST_CORRECTION = 4.0
"""A prediction is corrected by this factor at most: a few inputs are no more certain than that."""


class SingleWeightTrial:
    """A model in which one weight at a time is replaced."""

    def __init__(self, model: nn.Module, held_out: Calibration) -> None:
        self.model, self.held_out = copy.deepcopy(model), held_out
        self.state = self.model.state_dict()
        self.original = self._predictions()

    def divergence(self, name: str, encoded: Encoded) -> float:
        """Mean divergence, in nats, of the predictions with this weight packed from those without."""
        before = self.state[name].clone()
        self.state[name].copy_(decode(encoded))
        pairs = zip(self.original, self._predictions(), strict=True)
        found = [divergence_of(original, changed) for original, changed in pairs]
        self.state[name].copy_(before)
        return sum(total for total, _ in found) / sum(count for _, count in found)

    def _predictions(self) -> list[Predictions]:
        with torch.no_grad():
            return [predictions_of(forward(self.model, batch), batch) for batch in self.held_out.batches]


def correct_curve(curve: Curve, place: int, measured: float) -> Curve:
    """A curve scaled to the loss that was measured at one of its steps."""
    predicted = curve.losses[place]
    if not predicted > 0 or not measured > 0:
        return curve
    factor = min(max(measured / predicted, 1 / LARGEST_CORRECTION), LARGEST_CORRECTION)
    return replace(
        curve,
        losses=[loss * factor for loss in curve.losses],
        step_at_unit_slope=curve.step_at_unit_slope / factor**0.5,
    )
