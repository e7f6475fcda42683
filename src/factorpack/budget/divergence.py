"""How far one model's answers are from another's."""

from __future__ import annotations

from factorpack.budget.outputs import Answer


def divergence_of(wanted: Answer, found: Answer) -> tuple[float, int]:
    """Kullback-Leibler divergence in nats, summed over all answers, and their number."""
    before, after = wanted.values.double(), found.values.double()
    if wanted.logits:
        before, after = before.log_softmax(-1), after.log_softmax(-1)
        return float((before.exp() * (before - after)).sum()), len(before)
    spread = (2 * before.square().mean()).clamp_min(1e-30)
    return float((before - after).square().sum() / spread), len(before)
