"""What one compressed weight alone does to a model's answers, measured and not predicted."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from factorpack.batches import forward
from factorpack.budget.curves import Curve
from factorpack.budget.divergence import divergence_of
from factorpack.budget.outputs import Answer, answer_of
from factorpack.calibrate import Calibration
from factorpack.decoding import decode
from factorpack.record import Encoded

MOST = 4.0
"""A prediction is put right by this factor at most: a handful of inputs is no more certain."""


class Alone:
    """A model in which one weight at a time is replaced."""

    def __init__(self, model: nn.Module, held: Calibration) -> None:
        self.model, self.held = copy.deepcopy(model), held
        self.state = self.model.state_dict()
        self.wanted = self._answers()

    def divergence(self, name: str, encoded: Encoded) -> float:
        """Mean divergence, in nats, of the answers with this weight packed from those without."""
        original = self.state[name].clone()
        self.state[name].copy_(decode(encoded))
        pairs = zip(self.wanted, self._answers(), strict=True)
        found = [divergence_of(wanted, answer) for wanted, answer in pairs]
        self.state[name].copy_(original)
        return sum(total for total, _ in found) / sum(count for _, count in found)

    def _answers(self) -> list[Answer]:
        with torch.no_grad():
            return [answer_of(forward(self.model, batch), batch) for batch in self.held.batches]


def refined(curve: Curve, place: int, measured: float) -> Curve:
    """A curve whose loss at one of its steps turned out to be another."""
    predicted = curve.losses[place]
    if not predicted > 0 or not measured > 0:
        return curve
    right = min(max(measured / predicted, 1 / MOST), MOST)
    return replace(
        curve,
        losses=[loss * right for loss in curve.losses],
        step_at_unit_slope=curve.step_at_unit_slope / right**0.5,
    )
