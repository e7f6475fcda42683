"""The cost of a bit during a run: a fixed rate, or one that is steered towards a file size."""

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
from factorpack.tune.trim import Curvature, remove_dead_rows, trim

Finish = Callable[[Packed], Packed]

FIRST_RATE = 0.1
_MAX_INTERVAL = 20  # steps between two updates of the rate
_MIN_UPDATES = 100  # per run
_RECOVERY_UPDATES = 5.0
_MEASURES = 10
_TRIM = 0.7  # share of the steps after which a remaining gap is closed: the others can compensate for it
_RAMP = 0.5  # share of the steps that approach the size, the others train at it
_FIRST_OVER, _OVER = 0.06, 0.005
"""How far above its budget a run aims before and after the trim: codes that became zero rarely come back,
so the size is approached from above."""
_HOLD_RATE = 1e-3
"""The first rate of a run that starts within its budget: enough that codes do not grow at once."""
_FAR = 1.3
"""A larger multiple of the budget at the trim gives a warning."""
_ROUNDS = 200
_GAIN = 20.0


class Controller:
    """Steers a rate by the speed at which the size falls: the log rate changes with the error in speed.

    Codes change long after the real values behind them have begun to move, so the speed is that of the
    `soft` size of those values; the size itself only gives the distance to the target.
    """

    def __init__(self, rate: float) -> None:
        self.rate, self.soft = rate, 0.0

    def update(self, size: float, soft: float, aim: float, updates: float) -> None:
        """Adjusts the rate so that the size goes from `size` to `aim` within so many more updates."""
        wanted = math.log(aim / max(size, 1.0)) / updates
        speed = math.log(soft / self.soft) if self.soft else wanted
        change = min(max(_GAIN * (speed - wanted), -1.0), 1.0)
        self.rate = min(max(self.rate * math.exp(change), 1e-9), 1e9)
        self.soft = soft


class Steering:
    """The rate term of a run. With a `budget` in bytes, its rate is steered so that the file meets it.

    A run that `holds` starts within its budget, and is trimmed to it after every epoch.
    """

    def __init__(
        self,
        model: PackedModel,
        schedule: Schedule,
        steps: int,
        budget: int,
        measure: Callable[[], int],
        curvature: Curvature,
        holds: bool = False,
    ) -> None:
        self.term = RateTerm(quantized_rows(model), model.coded_weights())
        self.steps, self.budget, self.measure, self.curvature = steps, budget, measure, curvature
        self.holds = holds
        self.controller = Controller(schedule.rate or (_HOLD_RATE if holds else FIRST_RATE))
        self.every = max(min(_MAX_INTERVAL, steps // _MIN_UPDATES), 1)
        self.measure_every = self.every * max(steps // (_MEASURES * self.every), 1)
        self.trim_at = -1 if holds else self.every * round(_TRIM * steps / self.every)
        self.other_bytes = 0.0

    def before_step(self, done: int) -> None:
        """Refits the tables and adjusts the rate, every `every` steps."""
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
            # Headers, scales and the coder's overhead over the entropy change little in between.
            self.other_bytes += self.measure() - size
            size = self._estimate()
        self._steer(size, done / self.steps)

    def _warn_if_far(self, done: int) -> None:
        share = self.measure() / self.budget
        if share > _FAR:
            warnings.warn(
                f"after {done} of {self.steps} steps the file is still {share:.2g} times its target. The rest is "
                f"trimmed at once, which costs accuracy: train for more steps, or start from a file that is "
                f"closer to {self.budget} bytes",
                stacklevel=2,
            )

    def _steer(self, size: float, time: float) -> None:
        # Values move only as far as the learning rates allow: time is measured by their integral.
        left, total = _rate_integral(_RAMP) - _rate_integral(time), _rate_integral(1.0)
        interval = max(_rate_integral(time + self.every / self.steps) - _rate_integral(time), 1e-6)
        over = 0.0 if self.holds else _OVER if time * self.steps >= self.trim_at else _FIRST_OVER
        aim = self.budget * (1 + over)
        updates = max(left, 0.1 * total) / interval if size > aim and not self.holds else _RECOVERY_UPDATES
        with torch.no_grad():
            soft = self.term().item() * self.term.weights / 8 + self.other_bytes
        self.controller.update(size, soft, aim, updates)

    def _estimate(self) -> float:
        return self.term.refresh() / 8 + self.other_bytes

    def loss(self) -> Tensor:
        return self.controller.rate * self.term()

    def close(self) -> None:
        """Trims the file to its budget, if training has not met it."""
        if not self.fit():
            raise PlanError(f"no codes found whose file has at most {self.budget} bytes")

    def fit(self) -> bool:
        """Trims the file to its budget; False where that cannot be done."""
        return not self.budget or self._trim(self.budget)

    def _trim(self, limit: int) -> bool:
        for _ in range(_ROUNDS):
            excess = self.measure() - limit
            if excess <= 0:
                return True
            # Closes a gap in parts, down to the last thousandth: codes that move make similar ones cheaper too.
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


def _rate_integral(time: float) -> float:
    """The integral of the learning rates up to a share of the run: how far values can have moved."""
    return time / 2 + math.sin(math.pi * time) / (2 * math.pi)


def finish_packed(tensors: dict[str, Encoded], aliases: dict[str, str], finish: Finish | None) -> Packed:
    """What will be saved: without dead rows, and after the caller's `finish`."""
    packed = Packed({name: remove_dead_rows(encoded) for name, encoded in tensors.items()}, aliases)
    return packed if finish is None else finish(packed)


def budget_for(packed: Packed, ratio: float, finish: Finish | None) -> int:
    """Bytes of a file `ratio` times smaller than FP32; raises PlanError if even all-zero codes would exceed it."""
    if not ratio:
        return 0
    budget = int(packed.size().original_bytes / ratio)
    empty = finish_packed({name: _with_zero_codes(packed[name]) for name in packed}, packed.aliases, finish)
    least = file_bytes(empty, empty.aliases)
    if least > budget:
        raise PlanError(
            f"target_ratio {ratio:g} allows {budget} bytes, and even with all codes zero the file would have "
            f"{least}: raw tensors, scales and headers. Compress more of the tensors"
        )
    return budget


def _with_zero_codes(encoded: Encoded) -> Encoded:
    trainable = TRAINABLE.get(encoded.kind)
    if trainable is None or not trainable.trains_codes:
        return encoded
    parts = {
        name: torch.zeros_like(part) if name in encoded.bits else part for name, part in encoded.parts.items()
    }
    return replace(encoded, parts=parts)
