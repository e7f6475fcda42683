"""How far one model's outputs are from another's."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from factorpack.batches import forward
from factorpack.budget.coding import works_together
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.calibration.calibrate import Calibration
from factorpack.decoding import decode
from factorpack.record import Encoded

MOST_AT_ONCE = 1 << 30
"""Products of elements that BLAS adds up at once."""


class Reference:
    """A model's predictions for a batch, to measure the divergence of others from."""

    def __init__(self, original: Predictions) -> None:
        self.are_logits, self.count = original.are_logits, len(original.values)
        self.bytes = original.values.nbytes
        values = original.values.double()
        self._values = values.log_softmax(-1) if original.are_logits else values
        self._expected: Tensor | None = None
        """Where it is kept: the sum of p log p. The values are then the probabilities p."""
        if original.are_logits and works_together(values.device):
            logs, self._values = self._values, self._values.exp()
            self._expected = _sum_products(logs, self._values)

    def divergences(self, changed: Predictions, copies: int = 1) -> Tensor:
        """Kullback-Leibler divergences of copies, in nats, summed over the predictions of each: (copies,)."""
        before, after = self._values, changed.values.double().unflatten(0, (copies, -1))
        if not self.are_logits:
            variance = (2 * before.square().mean()).clamp_min(1e-30)
            return torch.stack([(before - each).square().sum() for each in after]) / variance
        logs = after.log_softmax(-1)
        if self._expected is not None:  # a third of the memory that is read and written
            return self._expected - torch.stack([_sum_products(each, before) for each in logs])
        # Exact even where models hardly differ, and the same bits as ever.
        return torch.stack([(before.exp() * (before - each)).sum() for each in logs])


def _sum_products(left: Tensor, right: Tensor) -> Tensor:
    """The sum of the products of two matrices' elements, without a matrix of products."""
    some = max(1, MOST_AT_ONCE // left.shape[1])
    blocks = zip(left.split(some), right.split(some), strict=True)
    return torch.stack([torch.dot(a.flatten(), b.flatten()) for a, b in blocks]).sum()


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
