"""How far one model's outputs are from another's."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from factorpack.batches import forward
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.calibration.calibrate import Calibration
from factorpack.decoding import decode
from factorpack.record import Encoded


def divergence_of(original: Predictions, compressed: Predictions) -> tuple[float, int]:
    """Kullback-Leibler divergence in nats, summed over all predictions, and their number."""
    before, after = original.values.double(), compressed.values.double()
    if original.are_logits:
        before, after = before.log_softmax(-1), after.log_softmax(-1)
        return float((before.exp() * (before - after)).sum()), len(before)
    variance = (2 * before.square().mean()).clamp_min(1e-30)
    return float((before - after).square().sum() / variance), len(before)


def measure_divergence(
    model: nn.Module, tensors: Mapping[str, Encoded], aliases: Mapping[str, str], held_out: Calibration
) -> float:
    """Mean Kullback-Leibler divergence, in nats, of the packed model's predictions from the original's."""
    packed = copy.deepcopy(model)
    state = {name: decode(encoded) for name, encoded in tensors.items()}
    packed.load_state_dict(state | {alias: state[target] for alias, target in aliases.items()})
    total, count = 0.0, 0
    for batch in held_out.batches:
        with torch.no_grad():
            original, compressed = (predictions_of(forward(net, batch), batch) for net in (model, packed))
        lost, predictions = divergence_of(original, compressed)
        total, count = total + lost, count + predictions
    return total / count
