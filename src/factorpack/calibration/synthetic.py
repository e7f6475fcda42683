"""Calibration inputs that nobody had to collect: made from what the model itself knows of its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.batches import evaluating
from factorpack.calibration.matched_inputs import input_shape, make_matched_inputs, norms_of
from factorpack.calibration.sampled_texts import sample_texts, why_not_a_text
from factorpack.errors import PlanError, SourceError
from factorpack.methods.settings import check_type
from factorpack.passes.resident import resident_of
from factorpack.progress import Showing
from factorpack.solve.moments import NORMS

SYNTHETIC = "synthetic"
"""What a caller gives in place of calibration data."""


@dataclass(frozen=True, slots=True)
class Synthetic:
    """How calibration inputs are made; what they are, the model decides.

    With batch norms, inputs are optimised until every norm sees the mean and the variance that it has stored.
    A model that predicts the next token writes texts itself. On a CPU the same seed gives the same inputs.
    """

    image_size: int | None = None
    """Side of the square images that a convolutional network takes. None: 224 where the network makes its maps
    16 times smaller than images or more, else the side whose smallest map has four places."""
    length: int = 128
    """Tokens of a text, at most as many as the model has positions."""
    steps: int = 60
    """Steps that every batch of inputs is optimised for."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"image_size": 1, "length": 2, "steps": 0, "seed": 0}.items():
            value = getattr(self, name)
            if value is None and name == "image_size":
                continue
            check_type(name, value, int)
            if value < least:
                raise PlanError(f"{name} is {value}, expected at least {least}")


def read_calibration(given: Any) -> Any:
    """Calibration data as they are; the word "synthetic" becomes a `Synthetic`."""
    if isinstance(given, str | Path) and given != SYNTHETIC:
        raise SourceError(
            f"calibration is {str(given)!r}, expected batches of inputs or 'synthetic'; the command line reads folders"
        )
    return Synthetic() if isinstance(given, str) and given == SYNTHETIC else given


def make_batches(model: nn.Module, settings: Synthetic, samples: int, progress: Showing = True) -> list[Any]:
    """`samples` inputs for a model, in batches on its device. The model is left as it was."""
    with evaluating(model):
        norms = norms_of(model)
        if norms:
            if resident_of(model) is not None:
                raise PlanError(
                    "inputs cannot be optimised through a streamed model: open it and compress that"
                )
            shape = input_shape(model, norms, settings.image_size)
            return make_matched_inputs(model, norms, shape, samples, settings.steps, settings.seed, progress)
        if (reason := why_not_a_text(model)) is None:
            return sample_texts(model, samples, settings.length, settings.seed, progress)
    raise PlanError(
        "synthetic calibration needs batch norms with running statistics, or a language model that predicts the "
        f"next token. This {type(model).__name__} {_describe_norms(model)}, and {reason}: give calibration data, "
        "a few hundred inputs without labels"
    )


def _describe_norms(model: nn.Module) -> str:
    count = sum(isinstance(module, NORMS) for module in model.modules())
    return f"has {count} batch norms without running statistics" if count else "has no batch norm"
