"""What the layers of two networks see, segment by segment: each network runs about once, whatever its depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import StopForward, batch_size, device_of, hooked
from factorpack.calibration.calibrate import (
    Calibration,
    all_finite,
    drop_padding,
    input_of,
    inputs_of_layers,
)
from factorpack.calibration.joined import join_for_predictions, join_inside
from factorpack.engine.memory import free_bytes
from factorpack.errors import SourceError
from factorpack.passes.cuts import version_of
from factorpack.passes.resident import resident_of
from factorpack.passes.segments import INPUTS, Border, Forms, run_on, run_to
from factorpack.record import LayerMoments, LayerSample
from factorpack.solve.moments import MomentAccumulator, has_moments, unfolding

BORDER_BYTES = 8 << 30
"""Activations kept on a GPU; what is above goes to the CPU."""
PLANNED_SHARE = 0.25
"""Share of the positions that suffice to round a layer, for moments that are only planned on."""
HOST_SHARE = 0.5
"""Share of the CPU's free memory for activations; a border that would take more is not kept."""
SEEN_BYTES = 1 << 30
"""Inputs of the original's layers that are kept until their layers are visited."""


class Walk:
    """Keeps, batch by batch, the activations with which the current segment starts, and moves them along.

    Layers are to be visited in execution order, and `compressed` is to be changed only in layers visited
    before. Where it is not so, or where a layer runs more than once, its inputs are computed from the start.
    """

    def __init__(
        self,
        calibration: Calibration,
        original: nn.Module,
        compressed: nn.Module | None = None,
        layers: Sequence[str] | None = None,
        border_bytes: int = BORDER_BYTES,
    ) -> None:
        """`layers` are those that will be visited; all by default."""
        self._calibration, self._border_bytes = join_inside(calibration, original), border_bytes
        self._whole = join_for_predictions(calibration, original)
        """For passes through the whole network."""
        self._original, self._compressed = original, compressed
        self._networks = [original] if compressed is None else [original, compressed]
        self._segments = calibration.segments(original)
        self._layers = [
            name
            for name in (calibration.order if layers is None else layers)
            if has_moments(original.get_submodule(name)) and self.segment_of(name) is not None
        ]
        self._tensors = _first_uses(self._networks[-1], calibration.order)
        self._places = {name: place for place, name in enumerate(calibration.order)}
        self._kept: dict[str, tuple[int, LayerMoments]] = {}
        self._too_large: set[int] = set()
        """Segments whose borders do not fit into memory."""
        self._seen_bytes = 0 if resident_of(original) is not None else SEEN_BYTES
        self._restart()

    def segment_of(self, layer: str) -> int | None:
        """The segment a layer runs in; None if it runs several times, or not on the first sample."""
        return None if layer in self._calibration.repeated else self._segments.segment_of.get(layer)

    def moments(self, layer: str) -> LayerMoments:
        """Moments of a layer's inputs; those of layers with the same input are kept for when they are visited."""
        changes, kept = self._kept.pop(layer, (None, None))
        if kept is not None and changes == self._changes_before(self.same_input(layer)[0]):
            return kept
        if not self._go_to(layer):
            return self._whole.moments([layer], self._original, self._compressed)[layer]
        group = self.same_input(layer)
        # All of them, even where some have been visited: sums are then the same wherever a run resumes.
        found = self._gather(group)
        changes = self._changes_before(group[0])
        self._kept |= {name: (changes, found[name]) for name in group[group.index(layer) + 1 :]}
        return found[layer]

    def sample(self, layer: str) -> LayerSample:
        """Inputs of a layer in the compressed network, and its outputs in the original one."""
        compressed = self._original if self._compressed is None else self._compressed
        if not self._go_to(layer):
            return self._whole.sample(layer, self._original, compressed)
        seen = [[self._input(n, layer, b) for b in self._batches] for n, _ in enumerate(self._networks)]
        return self._calibration.make_sample(layer, self._original, seen[-1], seen[0])

    def collect(self, layers: Sequence[str]) -> dict[str, LayerMoments]:
        """Moments of layers that follow one another, of one network and in one pass, which moves it along.

        They are for planning: fewer positions suffice.
        """
        assert self._compressed is None
        once = [name for name in layers if self.segment_of(name) is not None]
        others = [name for name in layers if name not in set(once)]
        found = self._whole.moments(others, self._original) if others else {}
        if once and self._go_to(once[0]):
            found |= self._pass_by(once)
        elif once:
            found |= self._whole.moments(once, self._original)
        return {name: found[name] for name in layers}

    @property
    def _batches(self) -> range:
        return range(len(self._calibration.batches))

    def _restart(self) -> None:
        self._place, self._changes = 0, 0
        self._borders = [[INPUTS for _ in self._batches] for _ in self._networks]
        self._forms: list[Forms] = [{} for _ in self._batches]
        self._seen: list[dict[str, Tensor]] = [{} for _ in self._batches]
        """Batch by batch, what layers of this segment that are not visited yet get in the original network."""

    def same_input(self, layer: str) -> list[str]:
        """The layers to visit that have the same input as this one, in execution order."""
        same, segment = self._segments.same_input.get(layer, (layer,)), self.segment_of(layer)
        group = [name for name in same if name in self._layers and self.segment_of(name) == segment]
        return group if layer in group else [layer]

    def _changes_before(self, layer: str) -> int:
        """How often the tensors of the network that come before a layer have been changed."""
        place = self._places.get(layer, 0)
        return sum(version_of(tensor) for first, tensor in self._tensors if first < place)

    def _go_to(self, layer: str) -> bool:
        """Moves to the segment of a layer; False if it lies behind, or in none."""
        segment = self.segment_of(layer)
        if segment is None:
            return False
        if self._place and self._changes != self._changes_at(self._place):
            self._restart()
        if segment > self._place and segment not in self._too_large:
            self._move_to(segment)
        return segment >= self._place

    def _changes_at(self, segment: int) -> int:
        known = self._segments.segment_of.items()
        return self._changes_before(next(name for name, its in known if its == segment))

    def _move_to(self, segment: int) -> None:
        """Runs every network on every batch up to a segment, unless that takes too much memory to keep."""
        self._kept = {name: kept for name, kept in self._kept.items() if self.segment_of(name) == segment}
        self._seen = [{} for _ in self._batches]
        # A network that reads its weights reads those of a segment once for all batches.
        streamed = resident_of(self._original) is not None
        for place in range(self._place + 1, segment + 1) if streamed else [segment]:
            changes = self._changes_at(place)
            for network, model in enumerate(self._networks):
                for index in self._batches:
                    border = run_to(model, *self._context(network, index), place)
                    if (network, index) == (0, 0) and not self._fits(border):
                        self._too_large.add(segment)
                        return
                    self._borders[network][index] = self._stored(border)
            self._place, self._changes = place, changes

    def _context(self, network: int, index: int) -> tuple[Any, Any, Border, Forms]:
        """What a pass of a network on a batch starts from."""
        batch = self._calibration.batches[index]
        return batch, self._segments, self._borders[network][index], self._forms[index]

    def _fits(self, first: Border) -> bool:
        """Whether the borders of all batches fit into memory, judged by the first.

        A network that reads its weights must keep them: without, each batch would read the whole network.
        """
        free, batches = free_bytes(), self._calibration.batches
        total = first.bytes / batch_size(batches[0]) * len(self._calibration) * len(self._networks)
        if device_of(self._original).type != "cpu":
            total -= self._border_bytes
        fits = free is None or total <= HOST_SHARE * free
        if not fits and resident_of(self._original) is not None:
            raise SourceError(
                f"the activations between two blocks take {total:.3g} bytes, more than half of the free memory: "
                "give fewer or shorter samples"
            )
        return fits

    def _stored(self, border: Border) -> Border:
        value = border.value
        if value is None or value.device.type == "cpu":
            return border
        held = [each.value for borders in self._borders for each in borders]
        on_device = sum(each.nbytes for each in held if each is not None and each.device.type != "cpu")
        return Border(border.place, value if on_device + value.nbytes <= self._border_bytes else value.cpu())

    def _inputs(self, layer: str, index: int) -> list[Tensor]:
        """A layer's inputs in every network."""
        if self._compressed is None:
            return [self._input(0, layer, index)]
        if self._compressed is self._original:  # which then changes
            return [self._input(network, layer, index) for network in (0, 1)]
        return [self._original_input(layer, index), self._input(1, layer, index)]

    def _input(self, network: int, layer: str, index: int) -> Tensor:
        batch, *border = self._context(network, index)
        return input_of(self._networks[network], layer, batch, lambda model, _: run_on(model, batch, *border))

    def _original_input(self, layer: str, index: int) -> Tensor:
        """A layer's input in the original, which stays as it is: one pass finds those of later layers, too."""
        seen, (batch, *border) = self._seen[index], self._context(0, index)
        if layer not in seen:
            names = [layer, *self._groups_behind(layer)]
            most = self._seen_bytes * batch_size(batch) // len(self._calibration)
            seen |= inputs_of_layers(
                self._original, names, batch, lambda model, _: run_on(model, batch, *border), most
            )
        return seen.pop(layer)

    def _groups_behind(self, layer: str) -> list[str]:
        """The first of every group of layers with one input that is to be visited later in a layer's segment."""
        segment, place = self.segment_of(layer), self._places[layer]
        return [
            name
            for name in self._layers
            if self._places[name] > place
            and self.segment_of(name) == segment
            and self.same_input(name)[0] == name
        ]

    def _accumulators(
        self, group: Sequence[str], share: float = 1.0
    ) -> list[tuple[list[str], MomentAccumulator]]:
        """One accumulator for all layers of a group whose inputs unfold alike."""
        alike: dict[object, list[str]] = {}
        for name in group:
            alike.setdefault(unfolding(self._original.get_submodule(name)), []).append(name)
        return [(names, self._accumulator(names, share)) for names in alike.values()]

    def _accumulator(self, names: Sequence[str], share: float) -> MomentAccumulator:
        first, *others = (self._original.get_submodule(name) for name in names)
        rows = self._calibration.rows_per_batch(self._original, names[0], share)
        return MomentAccumulator(first, rows, others)

    def _gather(self, group: Sequence[str]) -> dict[str, LayerMoments]:
        """Moments of layers with one input: one run of each network up to the first of them."""
        layer, running, finite = group[0], self._accumulators(group), []
        for index, batch in enumerate(self._calibration.batches):
            inputs = self._inputs(layer, index)
            for names, sums in running:
                module = self._original.get_submodule(names[0])
                seen = [drop_padding(module, each, batch) for each in inputs]
                finite.append(all_finite(seen))
                sums.add(seen[-1], None if self._compressed is None else seen[0])
        self._calibration.check_finite(layer, self._original, torch.stack(finite).all())
        return _results(running)

    def _pass_by(self, layers: Sequence[str]) -> dict[str, LayerMoments]:
        """Moments of all layers along one pass through their segments, to the start of the next."""
        groups = [group for group in map(self._group_within(layers), layers) if group]
        running = {group[0]: self._accumulators(group, PLANNED_SHARE) for group in groups}
        finite: dict[str, list[Tensor]] = {name: [] for name in running}
        stop = self._next_stop(layers)
        borders: list[Border] = []
        for index, batch in enumerate(self._calibration.batches):
            hooks = {
                name: _adding(sums, finite[name], batch, last=stop is None and name == groups[-1][0])
                for name, sums in running.items()
            }
            with hooked(self._original, hooks):
                context = self._context(0, index)
                if stop is None:
                    run_on(self._original, *context)
                    continue
                border = run_to(self._original, *context, stop)
            stop = stop if index or self._fits(border) else None
            borders += [] if stop is None else [self._stored(border)]
        for name, flags in finite.items():
            if len(flags) < len(self._batches):
                raise SourceError(
                    f"layer {name!r} does not run on the calibration data, so it cannot be calibrated"
                )
            self._calibration.check_finite(name, self._original, torch.stack(flags).all())
        if stop is not None:
            self._borders[0], self._place, self._changes = borders, stop, self._changes_at(stop)
        return {name: moments for sums in running.values() for name, moments in _results(sums).items()}

    def _group_within(self, layers: Sequence[str]) -> Callable[[str], list[str]]:
        """For the first layer of each group, its members among `layers`; for the others nothing."""

        def members(layer: str) -> list[str]:
            group = [name for name in self.same_input(layer) if name in layers]
            return group if group[0] == layer else []

        return members

    def _next_stop(self, layers: Sequence[str]) -> int | None:
        """The segment after those of some layers; None if there is none, or layers of theirs are left out."""
        last = self.segment_of(layers[-1])
        assert last is not None
        behind = [name for name in self._layers if self._places[name] > self._places[layers[-1]]]
        left_out = any(self.segment_of(name) == last for name in behind)
        return None if left_out or last + 1 >= len(self._segments) else last + 1


def _adding(
    running: Sequence[tuple[list[str], MomentAccumulator]], finite: list[Tensor], batch: Any, last: bool
) -> Callable[..., None]:
    """A hook that adds a layer's inputs to sums, and stops the pass at the last layer."""

    def hook(module: nn.Module, inputs: Sequence[Any]) -> None:
        seen = drop_padding(module, inputs[0].detach(), batch)
        finite.append(all_finite([seen]))
        for _, sums in running:
            sums.add(seen)
        if last:
            raise StopForward

    return hook


def _results(running: Sequence[tuple[list[str], MomentAccumulator]]) -> dict[str, LayerMoments]:
    return {
        name: moments for names, sums in running for name, moments in zip(names, sums.results(), strict=True)
    }


def _first_uses(model: nn.Module, order: Sequence[str]) -> list[tuple[int, Tensor]]:
    """The tensors of a network's layers, and the place in the order of the first layer that has them."""
    found: dict[int, tuple[int, Tensor]] = {}
    streamed = resident_of(model) is not None
    for place, name in enumerate(order):
        layer = model.get_submodule(name)
        for tensor in [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]:
            if streamed and tensor.dim() > 1:
                continue  # it comes and goes, and is never changed in place
            found.setdefault(id(tensor), (place, tensor))
    return list(found.values())
