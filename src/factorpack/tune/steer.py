"""What a bit costs in the course of a run: a fixed rate, or one that is steered to a size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.format.packed_file import file_bytes
from factorpack.packed import Packed
from factorpack.record import Encoded
from factorpack.tune.packed_model import PackedModel
from factorpack.tune.rate import RateTerm, quantized_rows
from factorpack.tune.schedule import Schedule
from factorpack.tune.trainable import TRAINABLE
from factorpack.tune.trim import Curvature, trim, without_dead_rows

Finish = Callable[[Packed], Packed]

FIRST_RATE = 0.1
_LONGEST = 20  # steps between two looks at the codes
_LOOKS = 100  # at least, in a run
_LOOKS_BACK = 5.0
_MEASURES = 10
_TRIM = 0.7  # of the steps are done when a gap that is left is closed: the others can make up for it
_RAMP = 0.5  # of the steps lead to the size, the others are for training at it
_FIRST_OVER, _OVER = 0.06, 0.005
"""How far above its budget a run aims before and after that: codes that have become zero seldom come back,
so a size is come to from above."""
_FAR = 1.3
"""Times its budget a file may have when the gap is closed, without a warning."""
_ROUNDS = 200
_GAIN = 20.0


class Controller:
    """Steers a rate by the speed at which the size falls: its logarithm follows what the speed lacks.

    Codes change long after the numbers behind them have begun to move, so the speed is that of the `soft`
    size, of the numbers; only how far there is to go is told by the size itself.
    """

    def __init__(self, rate: float) -> None:
        self.rate, self.soft = rate, 0.0

    def update(self, size: float, soft: float, aim: float, looks: float) -> None:
        """Wants `aim` after so many looks more, where the size is `size` now."""
        wanted = math.log(aim / max(size, 1.0)) / looks
        speed = math.log(soft / self.soft) if self.soft else wanted
        change = min(max(_GAIN * (speed - wanted), -1.0), 1.0)
        self.rate = min(max(self.rate * math.exp(change), 1e-9), 1e9)
        self.soft = soft


class Steering:
    """The rate term of a run. With a `budget` in bytes its rate is steered so that the file meets it."""

    def __init__(
        self,
        model: PackedModel,
        schedule: Schedule,
        steps: int,
        budget: int,
        measure: Callable[[], int],
        curvature: Curvature,
    ) -> None:
        self.term = RateTerm(quantized_rows(model), model.coded_weights())
        self.steps, self.budget, self.measure, self.curvature = steps, budget, measure, curvature
        self.controller = Controller(schedule.rate or FIRST_RATE)
        self.every = max(min(_LONGEST, steps // _LOOKS), 1)
        self.measure_every = self.every * max(steps // (_MEASURES * self.every), 1)
        self.trim_at = self.every * round(_TRIM * steps / self.every)
        self.other_bytes = 0.0

    def before(self, done: int) -> None:
        """Fits the tables to the codes every so many steps, and steers."""
        if done % self.every:
            return
        size = self._estimate()
        if not self.budget:
            return
        if done == self.trim_at:
            self._warn_if_far(done)
            self._trim(int((1 + _OVER) * self.budget))
            size, self.controller.soft = self._estimate(), 0.0
        if done % self.measure_every == 0 or done == self.trim_at:
            # Headers, scales and whatever the coder adds to the entropy change little in between.
            self.other_bytes += self.measure() - size
            size = self._estimate()
        self._steer(size, done / self.steps)

    def _warn_if_far(self, done: int) -> None:
        share = self.measure() / self.budget
        if share > _FAR:
            warnings.warn(
                f"after {done} of {self.steps} steps the file is still {share:.2g} times its target, and what is "
                f"left is cut at once, which costs accuracy: train for more steps, or start from a file that "
                f"is nearer to {self.budget} bytes",
                stacklevel=2,
            )

    def _steer(self, size: float, time: float) -> None:
        # Numbers move as far as learning rates let them: what is left of that is the time there is.
        left, whole = _travel(_RAMP) - _travel(time), _travel(1.0)
        a_look = max(_travel(time + self.every / self.steps) - _travel(time), 1e-6)
        aim = self.budget * (1 + (_OVER if time * self.steps >= self.trim_at else _FIRST_OVER))
        looks = max(left, 0.1 * whole) / a_look if size > aim else _LOOKS_BACK
        with torch.no_grad():
            soft = self.term().item() * self.term.weights / 8 + self.other_bytes
        self.controller.update(size, soft, aim, looks)

    def _estimate(self) -> float:
        return self.term.refresh() / 8 + self.other_bytes

    def loss(self) -> Tensor:
        return self.controller.rate * self.term()

    def close(self) -> None:
        """Brings the file within its budget, if training has not."""
        if self.budget and not self._trim(self.budget):
            raise PlanError(f"no choice of codes found whose file has {self.budget} bytes or less")

    def _trim(self, limit: int) -> bool:
        for _ in range(_ROUNDS):
            excess = self.measure() - limit
            if excess <= 0:
                return True
            # A gap in parts, down to a last thousandth: codes that go make their like cheaper still.
            part = 0.4 if excess > 0.001 * limit else 1.0
            if not trim(self.term.rows, 8 * part * excess + 8, self.curvature):
                break
        return self.measure() <= limit

    def state(self) -> dict[str, Any]:
        numbers = [self.controller.rate, self.controller.soft, self.other_bytes]
        return {"numbers": numbers, "tables": self.term.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.controller.rate, self.controller.soft, self.other_bytes = state["numbers"]
        self.term.load(state["tables"])


def _travel(time: float) -> float:
    """How far numbers may have moved by a share of the run: the integral of its learning rates."""
    return time / 2 + math.sin(math.pi * time) / (2 * math.pi)


def finished(tensors: dict[str, Encoded], aliases: dict[str, str], finish: Finish | None) -> Packed:
    """What will be saved: dead rows gone, and whatever the caller does last."""
    packed = Packed({name: without_dead_rows(encoded) for name, encoded in tensors.items()}, aliases)
    return packed if finish is None else finish(packed)


def budget_for(packed: Packed, ratio: float, finish: Finish | None) -> int:
    """Bytes of a file that is `ratio` times smaller than FP32; refused where no codes could be that short."""
    if not ratio:
        return 0
    budget = int(packed.size().original_bytes / ratio)
    empty = finished({name: _zeroed(packed[name]) for name in packed}, packed.aliases, finish)
    least = file_bytes(empty, empty.aliases)
    if least > budget:
        raise PlanError(
            f"target_ratio {ratio:g} leaves {budget} bytes, and without a single code that is not zero "
            f"there would be {least}: what is kept raw, scales and headers. Compress more of the tensors"
        )
    return budget


def _zeroed(encoded: Encoded) -> Encoded:
    trainable = TRAINABLE.get(encoded.kind)
    if trainable is None or not trainable.trains_codes:
        return encoded
    parts = {
        name: torch.zeros_like(part) if name in encoded.bits else part for name, part in encoded.parts.items()
    }
    return replace(encoded, parts=parts)
