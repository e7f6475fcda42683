"""The best state of a run on its held-out inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from factorpack.packed import Packed
from factorpack.record import DTYPES, Encoded, dtype_name


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a run did to its loss on the held-out inputs."""

    inputs: int
    is_divergence: bool
    """Whether the loss is the divergence from the teacher alone, in nats."""
    start: float
    end: float
    epoch: int
    """After which the result is; 0 is the start."""
    epochs: int
    """How many were trained and measured."""

    def __str__(self) -> str:
        loss = "divergence from the teacher" if self.is_divergence else "loss"
        where = f"on {self.inputs} held-out inputs"
        if not self.epoch:
            return f"training did not help: the start is kept, its {loss} is {self.start:.4g} {where}"
        return f"{loss} {self.start:.4g} -> {self.end:.4g} {where}, best after epoch {self.epoch} of {self.epochs}"


class Best:
    """The best state so far on the held-out inputs: the start, until an epoch is better."""

    def __init__(self, start: float) -> None:
        # A start that gives no numbers is worse than anything that does.
        self.start = self.loss = start if math.isfinite(start) else math.inf
        self.epoch = self.measured = 0
        self.packed: Packed | None = None
        """None for the start."""

    def offer(self, epoch: int, loss: float, packed: Packed) -> None:
        self.measured = epoch
        if loss < self.loss:
            self.loss, self.epoch, self.packed = loss, epoch, packed

    def is_stale(self, patience: int) -> bool:
        return self.measured - self.epoch >= patience

    def state(self) -> dict[str, Any]:
        numbers = [self.start, self.loss, self.epoch, self.measured]
        return {"numbers": numbers, "packed": None if self.packed is None else as_state(self.packed)}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Best:
        best = cls(state["numbers"][0])
        _, best.loss, best.epoch, best.measured = state["numbers"]
        best.packed = None if state["packed"] is None else from_state(state["packed"])
        return best


def as_state(packed: Packed) -> dict[str, Any]:
    """A packed model in types that load without running code; no file on the way could be left by a kill."""
    tensors = {
        name: {
            **{each.name: getattr(encoded, each.name) for each in fields(Encoded)},
            "dtype": dtype_name(encoded.dtype),
            "parts": {part: values.cpu() for part, values in encoded.parts.items()},
            "bits": dict(encoded.bits),
        }
        for name, encoded in packed.items()
    }
    return {"tensors": tensors, "aliases": dict(packed.aliases)}


def from_state(state: dict[str, Any]) -> Packed:
    """The inverse of `as_state`."""
    tensors = {
        name: Encoded(**{**values, "shape": tuple(values["shape"]), "dtype": DTYPES[values["dtype"]]})
        for name, values in state["tensors"].items()
    }
    return Packed(tensors, state["aliases"])
