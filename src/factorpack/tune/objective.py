"""What a run minimizes: the loss on labels, the divergence from a teacher, or both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import device_of, evaluating
from factorpack.tune.training_data import pair_of

Loss = Callable[[Tensor, Tensor], Tensor]


class Objective:
    """`teacher_share` of the divergence from a teacher's outputs, and the rest of the loss on labels."""

    def __init__(
        self, loss: Loss | None, teacher: nn.Module | None, teacher_share: float, temperature: float
    ) -> None:
        self.loss: Loss = loss or nn.functional.cross_entropy
        # The teacher is often the same object as the trained model: its outputs must not change.
        self.teacher = None if teacher is None else copy.deepcopy(teacher).eval().requires_grad_(False)
        self.share = teacher_share if teacher is not None else 0.0
        self.temperature = temperature

    @property
    def needs_labels(self) -> bool:
        return self.share < 1

    def __call__(
        self, logits: Tensor, inputs: Tensor, labels: Tensor | None, temperature: float | None = None
    ) -> Tensor:
        total = logits.new_zeros(())
        if self.share > 0 and self.teacher is not None:
            with torch.no_grad():
                teacher_logits = self.teacher(inputs)
            softened = distillation(logits, teacher_logits, temperature or self.temperature)
            total = total + self.share * softened
        if self.share < 1 and labels is not None:
            total = total + (1 - self.share) * self.loss(logits, labels)
        return total

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> float:
        """Mean over inputs, in evaluation mode; a teacher alone gives the divergence from it, in nats."""
        total, count = 0.0, 0
        with evaluating(model), torch.no_grad():
            for batch in batches:
                inputs, labels = pair_of(batch, device_of(model), self.needs_labels)
                total += len(inputs) * float(self(model(inputs), inputs, labels, temperature=1.0))
                count += len(inputs)
        return total / count


def distillation(logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(teacher || student) of softened outputs, mean over samples."""
    student = (logits / temperature).log_softmax(-1)
    target = (teacher_logits / temperature).log_softmax(-1)
    divergence = nn.functional.kl_div(student, target, log_target=True, reduction="none").sum(-1).mean()
    return temperature**2 * divergence
