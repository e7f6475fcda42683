"""Copies of a batch side by side in one pass, each changed by another weight.

A GPU takes little longer for many samples than for few. It is done only where a network's outputs for some
samples do not depend on the others. A layer that gets them in their order multiplies one copy by a weight of its
own, so that all weights of a segment are tried in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from factorpack.batches import StopForward, batch_size, hooked, join_batches, repeat_batch, slice_batch
from factorpack.budget.outputs import Predictions, main_tensor, predictions_in, predictions_of
from factorpack.errors import SourceError
from factorpack.passes.segments import (
    INPUTS,
    Border,
    Forms,
    Segments,
    recording,
    run_between,
    run_on,
    stubbed,
    tensor_in,
)
from factorpack.solve.evenly import spread_evenly
from factorpack.solve.moments import has_moments

COPY_BYTES = 1 << 29
"""Outputs of all copies that are computed at once."""
BETWEEN = 2
"""Activations between two segments may take so many times as much: fewer tensors of them are made than of outputs."""
WITHIN = 4
"""Activations inside a segment are about as many times as large as those at its border."""
COMPARED = 64
"""Values of each row of a layer's input that show whether rows are in the order of samples."""
ALIKE = 5e-3
"""A difference that counts as none, relative to that of samples: products may be of reduced precision."""


class Replacement(NamedTuple):
    """Another weight for a layer."""

    values: Tensor
    moved_mean: Tensor | None = None
    """What is taken from the layer's outputs, (out,): how far the weight moves their mean, if that is restored."""


class Head(NamedTuple):
    """A layer whose outputs are the predictions, as they are."""

    layer: str
    output: str
    """What the model calls them."""


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
        self._in_order: list[str] = []
        """Layers that get the samples in their order, as far as is known."""
        self._head: Head | None = None
        self.are_independent = cache(self._are_independent)

    def can_change(self, layer: str) -> bool:
        """Whether one copy may get a weight of its own in a layer."""
        return self.are_independent() and layer in self._in_order

    def split(self, names: Sequence[str]) -> Iterator[Sequence[str]]:
        """As many of the names at a time as there may be copies between two segments."""
        largest = max((border.bytes for borders in self._borders for border in borders), default=0)
        most = BETWEEN * _at_once(WITHIN * largest)
        return (names[start : start + most] for start in range(0, len(names), most))

    def move(self, index: int, copies: Border, place: int) -> Border:
        """Copies of a batch, moved along to the start of a later segment."""
        return run_between(self._model, *self._context(index, copies), place)

    def move_changed(
        self, index: int, copies: Border, weights: Mapping[str, Replacement], segment: int
    ) -> Border:
        """Copies at the start of a segment, if any, moved to its end; then one for each layer, its weight changed."""
        before = 0 if copies.value is None else self._count(index, copies)
        count, start = before + len(weights), self._borders[index][segment]
        if start.value is not None:
            new = [start.value] * len(weights)
            start = Border(segment, torch.cat(new if copies.value is None else [copies.value, *new]))
        stubs = {
            layer: _changed_for_one(self._model.get_submodule(layer), weight, before + place, count)
            for place, (layer, weight) in enumerate(weights.items())
        }
        with stubbed(self._model, stubs):
            return run_between(self._model, *self._context(index, start, count), segment + 1)

    def predict(self, index: int, copies: Border, bytes_each: int) -> Iterator[tuple[Predictions, int]]:
        """Predictions for some copies at a time, and how many they are for."""
        assert copies.value is not None
        if self._head is not None:  # alone: what is before it runs once for all copies
            inputs, head = self._inputs_of_head(index, copies), self._model.get_submodule(self._head.layer)
            rows = len(inputs) // self._count(index, copies)
            for some in inputs.split(_at_once(bytes_each) * rows):
                count = len(some) // rows
                batch = repeat_batch(self._batches[index], count)
                with torch.inference_mode(False), torch.no_grad():
                    yield predictions_in(self._head.output, head(some), batch), count
            return
        rows = self._rows(index, copies.place)
        for values in copies.value.split(_at_once(bytes_each) * rows):
            some = Border(copies.place, values)
            context = self._context(index, some)
            yield predictions_of(run_on(self._model, *context), context[0]), len(values) // rows

    def _inputs_of_head(self, index: int, copies: Border) -> Tensor:
        found: list[Tensor] = []

        def stop(_module: nn.Module, inputs: Sequence[Any]) -> None:
            found.append(inputs[0].detach())
            raise StopForward

        assert self._head is not None
        with hooked(self._model, {self._head.layer: stop}):
            run_on(self._model, *self._context(index, copies))
        return found[0]

    def _rows(self, index: int, place: int) -> int:
        """Of one copy, in the first dimension at a border."""
        value = self._borders[index][place].value
        assert value is not None
        return len(value)

    def _count(self, index: int, copies: Border) -> int:
        return 1 if copies.value is None else len(copies.value) // self._rows(index, copies.place)

    def _context(self, index: int, copies: Border, count: int = 0) -> tuple[Any, Segments, Border, Forms]:
        """What a pass of copies of a batch starts from; at the inputs, their number must be given."""
        count = count or self._count(index, copies)
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
        """Whether the first batch gives the same activations and predictions with another one behind it.

        Notes which layers get it first.
        """
        forms, batch, alike = Forms(), self._batches[0], []
        rows_of_both, rows_of_one = Rows(), Rows()

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
        noting = (_noting(model, segments, rows) for rows in (rows_of_both, rows_of_one))
        with recording(model, segments, INPUTS, forms), hooked(model, next(noting), hooks):
            found = predictions_of(run_on(model, both, segments, INPUTS, forms), both)
        returned: list[tuple[Any, int]] = []
        *_, last = segments.segment_of

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            returned.append((output, getattr(output, "_version", 0)))

        with hooked(model, next(noting), {last: keep}):
            output = run_on(model, batch, segments, INPUTS, self._forms[0])
        wanted = predictions_of(output, batch)
        self._in_order = _in_order(rows_of_both, rows_of_one)
        name, tensor = main_tensor(output)
        is_head = [(id(tensor), tensor._version)] == [(id(each), version) for each, version in returned]
        self._head = Head(last, name) if is_head and last in self._in_order else None
        alike.append(_are_alike(found.values, wanted.values))
        doubled = {name: _times(2, form.shape) for name, form in self._forms[0].items()}
        if doubled != {name: form.shape for name, form in forms.items()}:
            return False
        return found.are_logits == wanted.are_logits and bool(torch.stack(alike).all())


Rows = dict[str, list[Tensor]]
"""Some values of each row of what a layer gets, call by call."""


def _noting(model: nn.Module, segments: Segments, rows: Rows) -> dict[str, Callable[..., None]]:
    """Hooks that note what layers get whose weight may be another one for one copy."""

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Sequence[Any]) -> None:
            if not inputs or not isinstance(inputs[0], Tensor) or inputs[0].dim() < 2:
                return
            values = inputs[0].detach().flatten(1)
            some = spread_evenly(values.shape[1], min(COMPARED, values.shape[1]), values.device)
            rows.setdefault(name, []).append(values[:, some])

        return hook

    layers = [name for name in segments.segment_of if has_moments(model.get_submodule(name))]
    return {name: note(name) for name in layers}


def _in_order(both: Rows, one: Rows) -> list[str]:
    """Layers that run once, and get the rows of one batch before those of another that is as large."""
    names = [name for name in one if len(one[name]) == 1 and len(both.get(name, [])) == 1]
    names = [name for name in names if len(both[name][0]) == 2 * len(one[name][0])]
    if not names:
        return []
    alike = torch.stack([_are_alike(both[name][0], one[name][0]) for name in names]).tolist()
    return [name for name, same in zip(names, alike, strict=True) if same]


def _changed_for_one(layer: nn.Module, weight: Replacement, place: int, count: int) -> Callable[..., Tensor]:
    """A forward of a layer that has another weight for one of so many copies."""
    forward = layer.forward

    def changed(inputs: Tensor, *others: Any, **named: Any) -> Tensor:
        found: Tensor = forward(inputs, *others, **named)
        size = len(inputs) // count
        mine = slice(place * size, (place + 1) * size)
        with _holding(layer, weight.values), less(layer, weight.moved_mean):
            found[mine] = forward(inputs[mine], *others, **named)
        return found

    return changed


@contextmanager
def _holding(layer: nn.Module, weight: Tensor) -> Iterator[None]:
    """Another weight inside the block, without a copy."""
    own = layer.weight
    assert isinstance(own, Tensor)
    before = own.data
    try:
        own.data = weight
        yield
    finally:
        own.data = before


@contextmanager
def less(layer: nn.Module, moved_mean: Tensor | None) -> Iterator[None]:
    """A layer whose outputs are smaller by that much, (out,), inside the block."""
    if moved_mean is None:
        yield
        return
    own, weight = layer.bias, layer.weight
    assert own is None or isinstance(own, Tensor)
    assert isinstance(weight, Tensor)
    moved_mean = moved_mean.to(weight)
    layer.bias = nn.Parameter(-moved_mean if own is None else own - moved_mean, requires_grad=False)
    try:
        yield
    finally:
        layer.bias = own


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
