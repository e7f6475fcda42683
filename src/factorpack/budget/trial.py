"""What one compressed weight alone does to a model's outputs: measured, not predicted."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from factorpack.batches import batch_size, device_of
from factorpack.budget.coding import works_together
from factorpack.budget.divergence import Reference
from factorpack.budget.norms import moved_mean
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.budget.planner import HELD_OUT_SHARE
from factorpack.budget.side_by_side import Replacement, SideBySide, less
from factorpack.calibration.calibrate import Calibration
from factorpack.calibration.joined import tokens_kept
from factorpack.calibration.walk import BORDER_BYTES
from factorpack.decoding import decode
from factorpack.passes.segments import INPUTS, Border, Forms, Segments, borders_of, run_on
from factorpack.record import Encoded, layer_of
from factorpack.solve.moments import has_moments
from factorpack.weight import Weight

REFINEMENTS = 2
"""How often a plan is corrected by measurement: the second time at the steps of the first."""
WORK = 8
"""Forward passes over all calibration data that measuring may cost."""
FEWEST_INPUTS = 4
CPU_BORDER_BYTES = 1 << 30
"""Activations kept at the borders of segments where the model runs on a CPU."""


class Use(NamedTuple):
    """A layer that uses a weight, and the segment it runs in."""

    layer: str
    segment: int


class Changed(NamedTuple):
    """A weight that is tried."""

    name: str
    use: Use
    weight: Replacement
    in_one: bool
    """Whether its segment runs with others of its weights in the same pass."""


class SingleWeightTrial:
    """A model in which one weight at a time is replaced; it runs from the segment that holds the weight."""

    def __init__(self, model: nn.Module, held_out: Calibration) -> None:
        self.model, self._segments = copy.deepcopy(model), held_out.segments(model)
        some = held_out.first(_inputs_to_measure(model, held_out, len(self._segments)))
        self.held_out = some.merged(tokens_kept(some, model))
        self.state = self.model.state_dict()
        self._uses = _uses(self.model, self._segments, self.held_out.repeated)
        self._forms: list[Forms] = [{} for _ in self.held_out.batches]
        self._borders: list[list[Border]] = []
        self.original = [self._run_original(index) for index in range(len(self._forms))]
        self._count = sum(original.count for original in self.original)
        self._copies = SideBySide(
            self.model, self.held_out.batches, self._segments, self._forms, self._borders
        )

    def divergence(self, name: str, encoded: Encoded, weight: Weight | None = None) -> float:
        """Mean divergence, in nats, of the predictions with this weight packed from those without.

        With the original `weight`, the layer's mean output is restored, if it will be.
        """
        with self._holding(name, self._replacement(name, encoded, weight)):
            pairs = zip(self.original, self._predictions(name), strict=True)
            found = [original.divergences(changed).item() for original, changed in pairs]
        return sum(found) / self._count

    def divergences(
        self, encoded: Mapping[str, Encoded], weights: Mapping[str, Weight] | None = None
    ) -> Iterator[tuple[str, float]]:
        """The same of each of several weights: of as many as possible in one pass, where that is faster."""
        weights = weights or {}
        together = self._fit_together(encoded)
        for name in encoded:
            if name not in together:
                yield name, self.divergence(name, encoded[name], weights.get(name))
        in_one = {name for name in together if self._can_share_pass(name, together[name])}
        for some in self._copies.split(
            sorted(together, key=lambda n: (together[n].segment, n not in in_one))
        ):
            changed = [
                Changed(
                    name,
                    together[name],
                    self._replacement(name, encoded[name], weights.get(name)),
                    name in in_one,
                )
                for name in some
            ]
            found = [
                self._run_side_by_side(index, original, changed)
                for index, original in enumerate(self.original)
            ]
            totals = torch.stack(found).sum(0).double()
            yield from zip(some, (totals / self._count).tolist(), strict=True)

    def _fit_together(self, encoded: Mapping[str, Encoded]) -> dict[str, Use]:
        """Weights that one segment alone uses, and another follows, with that use."""
        if len(encoded) < 2 or not works_together(device_of(self.model)):
            return {}
        uses = {name: self._uses.get(self.state[name].data_ptr(), []) for name in encoded}
        last = len(self._segments) - 1
        known = {name: its[0] for name, its in uses.items() if len(its) == 1 and its[0].segment < last}
        return known if len(known) > 1 and self._copies.are_independent() else {}

    def _run_side_by_side(self, index: int, original: Reference, some: Sequence[Changed]) -> Tensor:
        """Divergences on a batch, of weights in execution order: each segment runs once for all before it.

        With its own weights it runs in the same pass, or, where that cannot be, once for each.
        """
        copies, last = INPUTS, len(self._segments) - 1
        for (segment, in_one), group in groupby(some, lambda each: (each.use.segment, each.in_one)):
            if in_one:
                if copies.value is not None and copies.place < segment:
                    copies = self._copies.move(index, copies, segment)
                weights = {each.use.layer: each.weight for each in group}
                copies = self._copies.move_changed(index, copies, weights, segment)
                continue
            if copies.value is not None and copies.place <= segment:
                copies = self._copies.move(index, copies, segment + 1)
            for each in group:
                own = self._run_alone(index, each)
                copies = own if copies.value is None else copies.joined(own)
        if copies.place < last:
            copies = self._copies.move(index, copies, last)
        return torch.cat(
            [original.divergences(*found) for found in self._copies.predict(index, copies, original.bytes)]
        )

    def _can_share_pass(self, name: str, use: Use) -> bool:
        """Whether one copy alone may have another weight: it is what a layer multiplies by."""
        own = self.model.get_submodule(use.layer)._parameters.get("weight")
        is_own = own is not None and own.data_ptr() == self.state[name].data_ptr()
        return is_own and self._copies.can_change(use.layer)

    def _run_alone(self, index: int, changed: Changed) -> Border:
        """The end of a weight's segment, with that weight in the network."""
        segment = changed.use.segment
        with self._holding(changed.name, changed.weight):
            return self._copies.move(index, self._borders[index][segment], segment + 1)

    def _replacement(self, name: str, encoded: Encoded, weight: Weight | None) -> Replacement:
        """A packed weight, as the network has it."""
        values = torch.empty_like(self.state[name]).copy_(decode(encoded))
        return Replacement(values, None if weight is None else moved_mean(weight, values))

    @contextmanager
    def _holding(self, name: str, weight: Replacement) -> Iterator[None]:
        """Another weight, inside the block."""
        before = self.state[name].clone()
        self.state[name].copy_(weight.values)
        try:
            with less(self.model.get_submodule(layer_of(name)), weight.moved_mean):
                yield
        finally:
            self.state[name].copy_(before)

    def _run_original(self, index: int) -> Reference:
        """The original's predictions for a batch; its activations at the segments' borders are kept."""
        batch = self.held_out.batches[index]
        output, borders = borders_of(self.model, batch, self._segments, self._forms[index])
        per_sample = sum(border.bytes for border in borders) / batch_size(batch)
        # Where they take too much memory only some of them are kept: passes then start a little earlier.
        every = math.ceil(max(per_sample * len(self.held_out), 1) / _most_bytes(self.model))
        self._borders.append([INPUTS, *borders[every - 1 :: every]])
        return Reference(predictions_of(output, batch))

    def _predictions(self, name: str) -> Iterator[Predictions]:
        """Predictions with the model as it is now, which is the original up to the weight `name`."""
        uses = self._uses.get(self.state[name].data_ptr(), [])
        segment = min((use.segment for use in uses), default=0)
        for index, batch in enumerate(self.held_out.batches):
            start = max((b for b in self._borders[index] if b.place <= segment), key=lambda b: b.place)
            output = run_on(self.model, batch, self._segments, start, self._forms[index])
            yield predictions_of(output, batch)


def _inputs_to_measure(model: nn.Module, held_out: Calibration, segments: int) -> int:
    """As many held-out inputs as keep the measuring of all weights within WORK passes over the calibration data."""
    weights = sum(has_moments(model.get_submodule(layer)) for layer in held_out.order)
    share = (segments + 1) / (2 * segments)  # of a forward pass, on average over the weights
    passes_per_input = REFINEMENTS * weights * share
    affordable = int(WORK / HELD_OUT_SHARE * len(held_out) / max(passes_per_input, 1))
    return min(max(affordable, FEWEST_INPUTS), len(held_out))


def _most_bytes(model: nn.Module) -> int:
    return CPU_BORDER_BYTES if device_of(model).type == "cpu" else BORDER_BYTES


def _uses(model: nn.Module, segments: Segments, repeated: Collection[str]) -> dict[int, list[Use]]:
    """Where the tensors of layers lie in memory -> who uses them; a repeated layer counts twice."""
    found: dict[int, list[Use]] = {}
    for layer, segment in segments.segment_of.items():
        for tensor in model.get_submodule(layer).parameters(recurse=False):
            found.setdefault(tensor.data_ptr(), []).extend([Use(layer, segment)] * (1 + (layer in repeated)))
    return found
