"""The settings of a fine-tuning run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from factorpack.errors import PlanError
from factorpack.methods.settings import check_type

_NUMBERS = (
    "learning_rate",
    "final_share",
    "weight_decay",
    "teacher_share",
    "temperature",
    "rate",
    "target_ratio",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast: the paper's cosine decay to 1e-3 of the first rate, without weight decay."""

    epochs: int = 5
    learning_rate: float = 3e-4
    final_share: float = 1e-3
    weight_decay: float = 0.0
    batch_norm: Literal["train", "frozen"] = "train"
    """"train" uses and updates batch statistics; "frozen" keeps the running ones, right for few images."""
    teacher_share: float = 1.0
    """With a teacher: the share of the loss that is distillation; the rest is the loss on the labels."""
    temperature: float = 1.0
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    seed: int = 0
    rate: float = 0.0
    """What a bit a weight costs, in units of the loss: above 0, training makes the codes shorter."""
    target_ratio: float = 0.0
    """Above 0: the file shall be this many times smaller than FP32, and `rate` is steered there from where
    it is. The file is never larger. After some hundred steps it is seldom more than one percent smaller,
    unless it was so from the start; codes are not made dearer to fill it up."""

    def __post_init__(self) -> None:
        for name in ("epochs", "seed"):
            check_type(name, getattr(self, name), int)
        for name in _NUMBERS:
            check_type(name, getattr(self, name), float, int)
        if self.epochs < 1 or not self.learning_rate > 0 or not 0 <= self.final_share <= 1:
            raise PlanError(
                f"epochs {self.epochs}, learning_rate {self.learning_rate}, final_share {self.final_share}: "
                "expected at least 1, above 0, and from 0 to 1"
            )
        if self.batch_norm not in ("train", "frozen"):
            raise PlanError(f"batch_norm is {self.batch_norm!r}, allowed are 'train' and 'frozen'")
        if not 0 <= self.teacher_share <= 1 or not self.temperature > 0 or not self.weight_decay >= 0:
            raise PlanError("teacher_share is from 0 to 1, temperature above 0, weight_decay not below 0")
        if self.mixed_precision not in ("no", "fp16", "bf16"):
            raise PlanError(
                f"mixed_precision is {self.mixed_precision!r}, allowed are 'no', 'fp16' and 'bf16'"
            )
        if not 0 <= self.rate < math.inf or not 0 <= self.target_ratio < math.inf:
            raise PlanError(
                f"rate {self.rate}, target_ratio {self.target_ratio}: expected 0, which is off, or more"
            )

    def decay(self, step: int, steps: int) -> float:
        """Share of the first learning rate at a step: half a cosine from 1 down to `final_share`."""
        fall = 0.5 * (1 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))
        return self.final_share + (1 - self.final_share) * fall
