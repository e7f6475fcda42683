"""How a budget is met, `Planner`, and what it is applied to, `BudgetRequest`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.budget.norm_bits import MOST_BITS
from factorpack.calibration.calibrate import Calibration
from factorpack.calibration.synthetic import Synthetic
from factorpack.engine import Engine
from factorpack.errors import PlanError
from factorpack.methods import Method, SecondOrder
from factorpack.methods.second_order import check_trellis
from factorpack.methods.settings import check_type
from factorpack.progress import Showing
from factorpack.source import Source

STATES = 8
HELD_OUT_SHARE = 0.125
"""Share of the calibration inputs that is held out to measure on."""


@dataclass(frozen=True, slots=True)
class Planner:
    """How a budget is met. Every ingredient can be switched off, to see what it is worth."""

    samples: int = 256
    """Calibration inputs to use: more are better, up to a thousand."""
    mirror: bool | None = None
    """Mirrored copies of calibration images beside them: more inputs to calibrate on. None: where there are fewer
    than 256, and the model takes most copies for the same as their originals."""
    views: bool = True
    """Mirrored and shifted views of calibration images for Linear layers that see one vector per image, as a
    classifier's last one, and hold a tenth of the weights, if the model takes most views for the same."""
    second_order: bool = True
    """Error feedback on the layer's inputs; without it each value is rounded alone."""
    reorder: bool = True
    """Columns of Linear layers rounded in the order in which error feedback costs least; without it, from first to
    last, as those of convolutions are."""
    sequential: bool = True
    """Each layer sees the outputs of the layers compressed before it, and compensates for their error."""
    basis: bool = True
    """Latents in a basis over tiles where that pays; without it the values themselves are rounded."""
    equal_slope: bool = True
    """Steps from each layer's sensitivity; without it each weight's relative squared error counts the same."""
    word_frequencies: bool = True
    """Rows of common words finer than those of rare ones, in tables of words and the heads that predict them."""
    refine: bool = True
    """Sensitivities corrected by what each layer alone does to the outputs on an eighth of the inputs."""
    correct_means: bool = True
    """Mean outputs corrected in norms and biases, layer by layer."""
    about_means: bool = True
    """Where means are corrected, weights coded by what varies at the outputs; without it, by all of them."""
    correct_variances: bool = True
    """Output variances corrected in the norms that follow, where means are."""
    fold_norms: bool = True
    """Batch norms as two values per channel; without it they are kept, and can be trained."""
    norm_bits: int | None = None
    """Bits of mantissa of norms and biases, 1 to 10. None: as many as the size makes worth their bytes. 0: FP16."""
    price: float = 0.08
    """What a bit is worth, in squared steps: less than theory's ln 2 / 6, chosen on training images. In tables of
    words whose rows have steps of their own it is worth nothing."""
    damping: float = 0.1
    """Added to the diagonal of the inputs' second moments, as a share of its mean."""
    ridge: float = 1.0
    """Added likewise where a weight adapts to the outputs of the layers compressed before it, less where there are
    many samples for each input: with too little it fits the sample and not the data."""
    trellis: int = STATES
    """States, 4 or 8, of a trellis along which codes are chosen where that pays; 0: none."""

    def __post_init__(self) -> None:
        check_type("samples", self.samples, int)
        if self.mirror is not None:
            check_type("mirror", self.mirror, bool)
        check_trellis(self.trellis)
        if self.norm_bits is not None:
            check_type("norm_bits", self.norm_bits, int)
            if not 0 <= self.norm_bits <= MOST_BITS:
                raise PlanError(f"norm_bits is {self.norm_bits}, expected 0 to {MOST_BITS}")
        if self.samples < 1 or not self.price >= 0 or not self.damping > 0 or not self.ridge > 0:
            raise PlanError(
                f"samples {self.samples}, price {self.price}, damping {self.damping}, ridge {self.ridge}: "
                "expected at least 1, at least 0, above 0, and above 0"
            )

    def method(
        self, step: float = 1.0, tile: int = 1, trellis: int = 0, price: float | None = None
    ) -> SecondOrder:
        """The method of a weight at a step, in the basis of a tile (1: none), along a trellis (0: none).

        Without a `price` of its own, a bit is worth the planner's.
        """
        return SecondOrder(
            step,
            tile=tile,
            price=self.price if price is None else price,
            damping=self.damping,
            trellis=trellis,
            try_plain=False,
            row_steps=True,
            smooth=True,
            restore_size=True,
            ridge=self.ridge,
            reorder=self.reorder,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BudgetRequest:
    """What is to be compressed into a budget, what is known of it, and what the caller decided."""

    source: Source
    model: nn.Module | None
    calibration: Calibration | Iterable[Any] | Synthetic | None
    planner: Planner
    layers: Mapping[str, Method]
    exclude: Sequence[str]
    curves: Path | None = None
    """A file to keep the curves in, so that another budget needs no planning."""
    progress: Showing = True
    parts: Path | None = None
    """A folder for what is finished, so that a killed run resumes; None keeps nothing."""
    engine: Engine | None = None
    """Whose workers measure sensitivities and curves; they read files in `parts`."""
