"""What a budget is planned by: the settings, and the work they are applied to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.budget.candidates import Rounding
from factorpack.calibrate import Calibration
from factorpack.errors import PlanError
from factorpack.methods import Method
from factorpack.methods.protocol import check_type
from factorpack.methods.second_order import check_trellis
from factorpack.source import Source

HELD_SHARE = 0.125
"""Of the calibration inputs, kept aside to measure on."""


@dataclass(frozen=True, slots=True)
class Planner:
    """How a budget is met; every ingredient can be left out, to see what it is worth."""

    samples: int = 256
    """Calibration inputs to use: more are better, up to a thousand."""
    second_order: bool = True
    """Error feedback on the layer's inputs; without it numbers are rounded one by one."""
    sequential: bool = True
    """Each layer sees what the layers compressed before it produce, and makes up for them."""
    basis: bool = True
    """Latents in a basis over tiles, where that pays; without it the numbers themselves are rounded."""
    equal_slope: bool = True
    """Steps from each layer's sensitivity; without it one step for all, relative to each weight's spread."""
    refine: bool = True
    """Sensitivities put right by what each layer alone does to the answers to an eighth of the inputs."""
    correct_means: bool = True
    """Mean outputs put right in norms and biases, layer by layer."""
    correct_spread: bool = True
    """Variances of outputs put right in the norms after them, where means are."""
    fold_norms: bool = True
    """Batch norms as two FP16 numbers a channel; without it they are kept, and can be trained."""
    price: float = 0.08
    """What a bit is worth, in squared steps: less than theory's ln 2 / 6, chosen on training images."""
    damping: float = 0.1
    """Added to the diagonal of the inputs' second moments, as a share of its mean."""
    trellis: int = 0
    """States, 4 or 8, of a trellis along which codes are chosen where that pays: smaller files, slower work."""

    def __post_init__(self) -> None:
        check_type("samples", self.samples, int)
        check_trellis(self.trellis)
        if self.samples < 1 or not self.price >= 0 or not self.damping > 0:
            raise PlanError(
                f"samples {self.samples}, price {self.price}, damping {self.damping}: "
                "expected at least 1, at least 0, and above 0"
            )

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.price, self.damping, self.basis, self.trellis)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What is to be compressed, with what is known of it and what the caller decided."""

    source: Source
    model: nn.Module | None
    calibration: Calibration | Iterable[Any] | None
    planner: Planner
    layers: Mapping[str, Method]
    exclude: Sequence[str]
    curves: Path | None = None
    """A file to keep the curves in, so that another budget needs no planning."""
    progress: bool = True
