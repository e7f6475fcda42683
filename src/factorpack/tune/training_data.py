"""Training data: what is trained, measured and planned on; number, form and order of batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from factorpack.errors import SourceError
from factorpack.tune.held_out import hold_out, read_once
from factorpack.tune.schedule import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class TrainingData:
    """What is trained on, measured on and planned on."""

    batches: Iterable[Any]
    held_out: list[Any]
    calibration: Iterable[Any]

    @classmethod
    def split(
        cls,
        batches: Iterable[Any],
        held_out: Iterable[Any] | None,
        calibration: Iterable[Any] | None,
        schedule: Schedule,
    ) -> TrainingData:
        length_of(batches)
        held: list[Any] = []
        if not schedule.trains_for_size and schedule.held_out_share:
            if held_out is not None:
                held = read_once(held_out, schedule.seed)
            else:
                batches, held = hold_out(batches, schedule.held_out_share, schedule.seed)
        return cls(batches, held, batches if calibration is None else calibration)


def length_of(batches: Iterable[Any]) -> int:
    try:
        length = len(batches)  # type: ignore[arg-type]
    except TypeError as error:  # a loader of an iterable dataset has a __len__ that fails
        raise SourceError(
            "the training data has no length, which the learning rate schedule needs"
        ) from error
    if length == 0:
        raise SourceError("the training data has no batches")
    return length


def pair_of(batch: Any, device: torch.device, needs_labels: bool = True) -> tuple[Tensor, Tensor | None]:
    """Inputs and labels on a device; inputs alone will do where no labels are needed."""
    if isinstance(batch, Tensor) and not needs_labels:
        return batch.to(device), None
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    if not is_pair or not all(isinstance(value, Tensor) for value in batch):
        expected = "(inputs, labels)" if needs_labels else "(inputs, labels) or inputs"
        raise SourceError(f"a training batch is a {type(batch).__name__}, expected {expected}")
    return batch[0].to(device), batch[1].to(device)


def generators_of(batches: Iterable[Any]) -> list[torch.Generator]:
    """The loader's own generators, which determine its order."""
    places = [batches, *(getattr(batches, name, None) for name in ("sampler", "batch_sampler"))]
    places.append(getattr(places[-1], "sampler", None))
    found = [getattr(place, "generator", None) for place in places]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())
