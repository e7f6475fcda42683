"""How far one model's outputs are from another's."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from factorpack.batches import forward
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.calibration.calibrate import Calibration
from factorpack.decoding import decode
from factorpack.record import Encoded


class Reference:
    """A model's predictions for a batch, to measure the divergence of others from."""

    def __init__(self, original: Predictions) -> None:
        self.are_logits, self.count = original.are_logits, len(original.values)
        self.bytes = original.values.nbytes
        self._values = original.values.double()
        """Logits as logarithms of probabilities."""
        if original.are_logits:
            self._values = self._values.log_softmax(-1)

    def divergences(self, changed: Predictions, copies: int = 1) -> Tensor:
        """Kullback-Leibler divergences of copies, in nats, summed over the predictions of each: (copies,)."""
        before, after = self._values, changed.values.double()
        if self.are_logits:
            logs = after.log_softmax(-1).unflatten(0, (copies, -1))
            lost = torch.sub(before, logs, out=logs).mul_(before.exp())  # in place: these may be gigabytes
            return torch.stack([each.sum() for each in lost])
        variance = (2 * before.square().mean()).clamp_min(1e-30)
        apart = before - after.unflatten(0, (copies, -1))
        return torch.stack([each.square().sum() for each in apart]) / variance


def divergence_of(original: Predictions, compressed: Predictions) -> tuple[float, int]:
    """Kullback-Leibler divergence in nats, summed over all predictions, and their number."""
    reference = Reference(original)
    return reference.divergences(compressed).item(), reference.count


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
