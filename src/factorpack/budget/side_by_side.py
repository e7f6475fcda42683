"""Copies of a batch side by side in one pass, each changed before by another weight.

A GPU takes little longer for many samples than for few. It is done only where a network's outputs for some
samples do not depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import batch_size, hooked, join_batches, repeat_batch, slice_batch
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.errors import SourceError
from factorpack.passes.segments import (
    INPUTS,
    Border,
    Forms,
    Segments,
    recording,
    run_between,
    run_on,
    tensor_in,
)

COPY_BYTES = 1 << 29
"""Outputs of all copies that are computed at once."""
WITHIN = 4
"""Activations inside a segment are about as many times as large as those at its border."""
ALIKE = 5e-3
"""A difference that counts as none, relative to that of samples: products may be of reduced precision."""


class SideBySide:
    """A network whose original activations on some batches, and their forms, are known."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        segments: Segments,
        forms: Sequence[Forms],
        borders: Sequence[Sequence[Border]],
    ) -> None:
        self._model, self._batches, self._segments = model, batches, segments
        self._forms, self._borders = forms, borders
        self.are_independent = cache(self._are_independent)

    def split(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """As many of the names at a time as there may be copies between two segments."""
        largest = max((border.bytes for borders in self._borders for border in borders), default=0)
        most = _at_once(WITHIN * largest)
        return (names[start : start + most] for start in range(0, len(names), most))

    def move(self, index: int, copies: Border, place: int) -> Border:
        """Copies of a batch, moved along to the start of a later segment."""
        return run_between(self._model, *self._context(index, copies), place)

    def predict(self, index: int, copies: Border, bytes_each: int) -> Iterator[tuple[Predictions, int]]:
        """Predictions for some copies at a time, and how many they are for."""
        assert copies.value is not None
        rows = self._rows(index, copies.place)
        for values in copies.value.split(_at_once(bytes_each) * rows):
            some = Border(copies.place, values)
            context = self._context(index, some)
            yield predictions_of(run_on(self._model, *context), context[0]), len(values) // rows

    def _rows(self, index: int, place: int) -> int:
        """Of one copy, in the first dimension at a border."""
        value = self._borders[index][place].value
        assert value is not None
        return len(value)

    def _context(self, index: int, copies: Border) -> tuple[Any, Segments, Border, Forms]:
        """What a pass of copies of a batch starts from."""
        count = 1 if copies.value is None else len(copies.value) // self._rows(index, copies.place)
        batch, forms = self._batches[index], self._forms[index]
        if count > 1:
            batch = repeat_batch(batch, count)
            forms = {name: replace(form, shape=_times(count, form.shape)) for name, form in forms.items()}
        return batch, self._segments, copies, forms

    def _are_independent(self) -> bool:
        """Whether samples come first in all activations, and do not depend on others: seen with other ones behind.

        Copies of the same samples would not show it: their mean, say, is that of one copy.
        """
        known = all(len(borders) == len(self._segments) for borders in self._borders)
        batch, size = self._batches[0], batch_size(self._batches[0])
        if not known or size < 2:
            return False
        other = repeat_batch(slice_batch(batch, 0, 1), size)
        try:
            return self._is_unchanged_by(other)
        except SourceError:  # it takes no batch of that size
            return False

    def _is_unchanged_by(self, other: Any) -> bool:
        """Whether the first batch gives the same activations and predictions with another one behind it."""
        forms, batch, alike = Forms(), self._batches[0], []

        def compare(border: Border) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                alike.append(_are_alike(tensor_in(output), border.value))

            return hook

        both = join_batches(batch, other)
        hooks = {
            cut.module: compare(border)
            for cut, border in zip(self._segments.cuts, self._borders[0][1:], strict=True)
        }
        model, segments = self._model, self._segments
        with recording(model, segments, INPUTS, forms), hooked(model, after=hooks):
            found = predictions_of(run_on(model, both, segments, INPUTS, forms), both)
        wanted = predictions_of(run_on(model, batch, segments, INPUTS, self._forms[0]), batch)
        alike.append(_are_alike(found.values, wanted.values))
        doubled = {name: _times(2, form.shape) for name, form in self._forms[0].items()}
        if doubled != {name: form.shape for name, form in forms.items()}:
            return False
        return found.are_logits == wanted.are_logits and bool(torch.stack(alike).all())


def _at_once(bytes_each: int) -> int:
    return max(1, COPY_BYTES // max(bytes_each, 1))


def _times(count: int, shape: torch.Size) -> torch.Size:
    return torch.Size([count * shape[0], *shape[1:]]) if shape else shape


def _are_alike(found: Tensor, wanted: Tensor | None) -> Tensor:
    """Whether the first values found are those that are wanted, on their device."""
    assert wanted is not None
    if found.shape[1:] != wanted.shape[1:]:
        return torch.tensor(False, device=found.device)
    first, wanted = found[: len(wanted)].float(), wanted.to(found.device).float()
    spread = (wanted - wanted.mean(0)).norm()  # over samples: what all have in common shows nothing
    precision = math.sqrt(torch.finfo(found.dtype).eps)
    close: Tensor = (first - wanted).norm() <= max(ALIKE, precision) * spread
    return close
