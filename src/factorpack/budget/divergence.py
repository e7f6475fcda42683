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
MANY = 1 << 22
"""Of as many logits the rounding errors of FP32 are nothing on average, and FP64 takes three times as long."""


class Reference:
    """A model's predictions for a batch, to measure the divergence of others from."""

    def __init__(self, original: Predictions) -> None:
        self.are_logits, self.count = original.are_logits, len(original.values)
        self.bytes = original.values.nbytes
        self._shares: Tensor | None = None
        """Probabilities p where they are kept, beside their logarithms."""
        if original.are_logits and works_together(original.values.device):
            self._values = _logs_on_gpu(original.values)
            self._shares = self._values.exp()
            return
        values = original.values.double()
        self._values = values.log_softmax(-1) if original.are_logits else values

    def divergences(self, changed: Predictions, copies: int = 1) -> Tensor:
        """Kullback-Leibler divergences of copies, in nats, summed over the predictions of each: (copies,)."""
        before = self._values
        if self._shares is not None:
            differences = (before - _logs_on_gpu(each) for each in changed.values.chunk(copies))
            return torch.stack([_sum_products(each, self._shares) for each in differences])
        after = changed.values.double().unflatten(0, (copies, -1))
        if not self.are_logits:
            variance = (2 * before.square().mean()).clamp_min(1e-30)
            return torch.stack([(before - each).square().sum() for each in after]) / variance
        logs = after.log_softmax(-1)
        # Exact even where models hardly differ, and the same bits as ever.
        return torch.stack([(before.exp() * (before - each)).sum() for each in logs])


def _logs_on_gpu(logits: Tensor) -> Tensor:
    """Logarithms of probabilities: of many logits in FP32, unless they have more."""
    return (
        logits.float() if logits.numel() >= MANY and logits.dtype.itemsize < 8 else logits.double()
    ).log_softmax(-1)


def _sum_products(left: Tensor, right: Tensor) -> Tensor:
    """The sum of the products of two matrices' elements, without a matrix of products."""
    some = max(1, MOST_AT_ONCE // left.shape[1])
    blocks = zip(left.split(some), right.split(some), strict=True)
    return torch.stack([torch.dot(a.flatten(), b.flatten()) for a, b in blocks]).double().sum()


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
