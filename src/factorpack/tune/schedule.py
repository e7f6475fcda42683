"""The settings of a fine-tuning run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from factorpack.budget.planner import HELD_OUT_SHARE
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
    "held_out_share",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and learning rates of a run: the paper's cosine decay to 1e-3 of the first rate, no weight decay."""

    epochs: int = 5
    learning_rate: float = 3e-4
    final_share: float = 1e-3
    weight_decay: float = 0.0
    batch_norm: Literal["train", "frozen"] = "train"
    """"train" uses and updates batch statistics; "frozen" keeps the running ones, better for few images."""
    codes: Literal["trained", "frozen"] = "trained"
    """"frozen" keeps the codes, and so the size, and trains scales, norms and biases, with learning rates
    relative to each tensor's RMS: better for few inputs. Codes along a trellis that are trained first become
    plain codes of about as many bits."""
    teacher_share: float = 1.0
    """With a teacher: the distillation share of the loss; the rest is the loss on the labels."""
    temperature: float = 1.0
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    seed: int = 0
    rate: float = 0.0
    """Cost of one bit per weight, in units of the loss: above 0, training makes the codes shorter."""
    target_ratio: float = 0.0
    """Above 0: the file must be at least this many times smaller than FP32."""
    shrink_by: Literal["planning", "training"] = "planning"
    """How a larger file gets to `target_ratio`. "planning" plans that size anew and trains from there, with
    batch norms and codes frozen. "training" adjusts `rate` (its start value) until the codes are short enough, for a
    real training set: with few inputs or steps it destroys the model. After a few hundred steps the file is
    rarely more than one percent smaller than required, unless it was from the start; codes are not
    lengthened to fill the budget."""
    held_out_share: float = HELD_OUT_SHARE
    """Share of the inputs, and 1,000 at most, that is not trained on: after each epoch the loss is measured on
    them, and the best state is the result. 0 keeps none, and the last state is the result. While training
    shrinks the file (`rate`, or `shrink_by` "training") none are kept either."""
    patience: int = 10
    """Training ends after this many epochs that were no better on the held-out inputs."""

    def __post_init__(self) -> None:
        for name in ("epochs", "seed", "patience"):
            check_type(name, getattr(self, name), int)
        for name in _NUMBERS:
            check_type(name, getattr(self, name), float, int)
        if self.epochs < 1 or not self.learning_rate > 0 or not 0 <= self.final_share <= 1:
            raise PlanError(
                f"epochs {self.epochs}, learning_rate {self.learning_rate}, final_share {self.final_share}: "
                "expected at least 1, above 0, and from 0 to 1"
            )
        if self.codes not in ("trained", "frozen"):
            raise PlanError(f"codes is {self.codes!r}, allowed are 'trained' and 'frozen'")
        if self.codes == "frozen" and self.trains_for_size:
            raise PlanError("codes is 'frozen', and training for size (rate, shrink_by) makes codes shorter")
        if self.batch_norm not in ("train", "frozen"):
            raise PlanError(f"batch_norm is {self.batch_norm!r}, allowed are 'train' and 'frozen'")
        if not 0 <= self.teacher_share <= 1 or not self.temperature > 0 or not self.weight_decay >= 0:
            raise PlanError(
                f"teacher_share {self.teacher_share}, temperature {self.temperature}, weight_decay "
                f"{self.weight_decay}: expected from 0 to 1, above 0, and at least 0"
            )
        if self.mixed_precision not in ("no", "fp16", "bf16"):
            raise PlanError(
                f"mixed_precision is {self.mixed_precision!r}, allowed are 'no', 'fp16' and 'bf16'"
            )
        if not 0 <= self.rate < math.inf or not 0 <= self.target_ratio < math.inf:
            raise PlanError(
                f"rate {self.rate}, target_ratio {self.target_ratio}: expected 0 for off, or more"
            )
        if self.shrink_by not in ("planning", "training"):
            raise PlanError(f"shrink_by is {self.shrink_by!r}, allowed are 'planning' and 'training'")
        if not 0 <= self.held_out_share <= 0.5 or self.patience < 1:
            raise PlanError(
                f"held_out_share {self.held_out_share}, patience {self.patience}: expected from 0 to 0.5, and "
                "at least 1"
            )

    @property
    def trains_for_size(self) -> bool:
        """Whether the file is to become smaller by training: no state before the last one is then the result."""
        by_training = self.shrink_by == "training" and self.target_ratio > 0
        return by_training or (self.rate > 0 and not self.target_ratio)

    def decay(self, step: int, steps: int) -> float:
        """The learning rate at a step relative to the first: a half cosine from 1 down to `final_share`."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))
        return self.final_share + (1 - self.final_share) * cosine
