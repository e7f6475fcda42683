"""How far one model's answers are from another's."""

from __future__ import annotations

from torch import Tensor


def divergence_of(wanted: Tensor, found: Tensor) -> tuple[float, int]:
    """Kullback-Leibler divergence in nats, summed over all answers, and their number.

    Answers are logits over the last axis; a single number is the mean of a Gaussian of the answers' spread.
    """
    wanted, found = wanted.double(), found.double()
    count = wanted[..., 0].numel()
    if wanted.shape[-1] == 1:
        spread = (2 * wanted.var(correction=0)).clamp_min(1e-30)
        return float((wanted - found).square().sum() / spread), count
    wanted, found = wanted.log_softmax(-1), found.log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum()), count
