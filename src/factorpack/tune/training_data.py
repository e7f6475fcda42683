"""Training batches: their number, their form, and the generators that shuffle them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from factorpack.errors import SourceError


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


def pair_of(batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    if not is_pair or not all(isinstance(value, Tensor) for value in batch):
        raise SourceError(f"a training batch is a {type(batch).__name__}, expected (inputs, labels)")
    return batch[0].to(device), batch[1].to(device)


def generators_of(batches: Iterable[Any]) -> list[torch.Generator]:
    """The loader's own generators, which determine its order."""
    places = [batches, *(getattr(batches, name, None) for name in ("sampler", "batch_sampler"))]
    places.append(getattr(places[-1], "sampler", None))
    found = [getattr(place, "generator", None) for place in places]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())
