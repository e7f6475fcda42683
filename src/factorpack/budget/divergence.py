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
    """A model's predictions for a batch, to measure the divergence of others from: what is needed each time."""

    def __init__(self, original: Predictions) -> None:
        self.are_logits, self.count = original.are_logits, len(original.values)
        self.nbytes = original.values.nbytes
        self._kept = original.values
        if original.are_logits:
            logs = original.values.double().log_softmax(-1)
            # Of the kept precision everywhere: a model then diverges from itself by nothing.
            self._kept = logs.exp().to(torch.promote_types(original.values.dtype, torch.float32))
            self._own = self._expected(logs)

    def divergences(self, changed: Predictions, copies: int = 1) -> Tensor:
        """Kullback-Leibler divergences of copies, in nats, summed over the predictions of each: (copies,)."""
        after = changed.values.double()
        if self.are_logits:
            return (self._own - self._expected(after.log_softmax(-1))).clamp_min(0.0)
        before = self._kept.double()
        variance = (2 * before.square().mean()).clamp_min(1e-30)
        lost: Tensor = (before - after.unflatten(0, (copies, -1))).square().sum((1, 2)) / variance
        return lost

    def _expected(self, logs: Tensor) -> Tensor:
        """The logarithms of probabilities, summed as often as the original predicts them: (copies,)."""
        kept = self._kept.double().flatten()
        return logs.reshape(-1, len(kept)) @ kept


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
