"""What calibration data show of a model: which layers run, their sensitivities, moments and norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from factorpack.batches import device_of
from factorpack.budget.embeddings import embedding_moments, row_moments
from factorpack.budget.journal import NOTHING_KEPT, Finished, Journal
from factorpack.budget.norms import norms_after
from factorpack.budget.planner import HELD_OUT_SHARE, Planner
from factorpack.budget.segment_gradients import measure_information_by_segment
from factorpack.budget.sensitivity import measure_information
from factorpack.budget.tensors import Tensors
from factorpack.budget.workers import Workers
from factorpack.calibration.calibrate import Calibration
from factorpack.calibration.walk import Walk
from factorpack.passes.resident import resident_of
from factorpack.progress import Showing
from factorpack.record import LayerMoments, weight_of
from factorpack.solve.moments import has_moments
from factorpack.weight import Weight

SENSITIVITY_SAMPLES = 256
FEWEST_TO_SPLIT = 16
"""With fewer inputs, none are held out to refine the plan on."""
MOMENT_BYTES = 1 << 30
"""Moments of as many layers as fit into this are gathered in one pass over the calibration data."""


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """What is known of a model's weights; without calibration data, nothing."""

    planner: Planner
    model: nn.Module | None = None
    calibration: Calibration | None = None
    held_out: Calibration | None = None
    """Inputs held out to measure on."""
    layer_of: Mapping[str, str] = field(default_factory=dict)
    """Weights of layers that run on the data and have moments -> layer, in execution order."""
    norm_of: Mapping[str, str] = field(default_factory=dict)
    """Layer -> the batch norm that follows it and may be corrected."""
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    row_costs: Mapping[str, LayerMoments] = field(default_factory=dict)
    """What errors in the rows of an embedding cost: rows are looked up, not multiplied."""
    workers: Workers | None = None
    """Who measures; None is this process."""

    def order(self, coded: Sequence[str]) -> list[str]:
        """Weights whose inputs are unknown, then the others in execution order."""
        return [*(name for name in coded if name not in self.layer_of), *self.layer_of]

    def weight(self, tensors: Tensors, name: str, moments: LayerMoments | None) -> Weight:
        """A weight with all that is known of it, as far as the planner uses it."""
        inputs = (self.row_costs.get(name) or moments) if self.planner.second_order else None
        return tensors.source.weight(name, inputs, self.sensitivity.get(name))

    def walk(self, compressed: nn.Module | None) -> Walk | None:
        """A walk along the layers, in the network as compressed so far beside the original."""
        if self.calibration is None or self.model is None:
            return None
        other = compressed if self.planner.sequential else None
        return Walk(self.calibration, self.model, other, list(self.layer_of.values()))

    def original_moments(self, tensors: Tensors) -> Iterator[tuple[list[str], dict[str, LayerMoments]]]:
        """Groups of weights in execution order, with the original network's moments where they are used."""
        walk = self.walk(None) if self.planner.second_order else None
        for group in self._groups(tensors, walk):
            layers = {name: self.layer_of[name] for name in group if name in self.layer_of}
            found = walk.collect(list(layers.values())) if walk is not None and layers else {}
            yield group, {name: found[layer] for name, layer in layers.items() if layer in found}

    def _groups(self, tensors: Tensors, walk: Walk | None) -> Iterator[list[str]]:
        """Weights whose moments fit into memory at once: whole segments, where one does not exceed it."""
        # A streamed model reads the weights of one segment at a time.
        alone = self.model is not None and resident_of(self.model) is not None
        segment_of = {name: walk.segment_of(layer) for name, layer in self.layer_of.items()} if walk else {}
        size_of = {name: _moment_bytes(tensors.source.entries[name].shape) for name in self.layer_of}
        group: list[str] = []
        held_bytes, last = 0, None
        for name in self.order(tensors.coded):
            segment, size = segment_of.get(name), size_of.get(name, 0)
            together = sum(size_of[each] for each, its in segment_of.items() if its == segment)
            needed = size if segment is None or segment == last else together
            if group and (held_bytes + needed > MOMENT_BYTES or (alone and segment != last)):
                yield group
                group, held_bytes = [], 0
            group, held_bytes, last = [*group, name], held_bytes + size, segment
        if group:
            yield group


def learn(
    tensors: Tensors,
    planner: Planner,
    calibration: Calibration | None,
    journal: Journal = NOTHING_KEPT,
    workers: Workers | None = None,
    progress: Showing = False,
) -> Knowledge:
    """Runs the model on the calibration data, forward and, for sensitivities not in the journal, backward."""
    model = tensors.model
    if model is None or calibration is None:
        return Knowledge(planner, model)
    held_out = None
    # What each weight alone does is measured by whole forward passes, each of which would read a streamed model.
    streamed = resident_of(model) is not None
    if not streamed and planner.refine and planner.equal_slope and len(calibration) >= FEWEST_TO_SPLIT:
        calibration, held_out = calibration.split(HELD_OUT_SHARE)
    if workers is not None:
        workers.know(model, calibration, held_out)
    layer_of = _layers_with_moments(model, calibration, tensors.coded)
    # A norm that stays as it is cannot correct a mean.
    norm_of = {
        layer: norm
        for layer, norm in norms_after(model, calibration.batches[0]).items()
        if not tensors.is_fixed_by_caller(f"{norm}.running_mean")
    }
    sensitivity: dict[str, float] = {}
    row_costs: dict[str, LayerMoments] = {}
    if planner.equal_slope:
        sensitivity, row_costs = _find_sensitivities(
            model, calibration, tensors, layer_of, journal, workers, progress
        )
    return Knowledge(
        planner, model, calibration, held_out, layer_of, norm_of, sensitivity, row_costs, workers
    )


def _find_sensitivities(
    model: nn.Module,
    calibration: Calibration,
    tensors: Tensors,
    layer_of: Mapping[str, str],
    journal: Journal,
    workers: Workers | None,
    progress: Showing,
) -> tuple[dict[str, float], dict[str, LayerMoments]]:
    """Sensitivities and the costs of rows: those of the run that is resumed, or measured."""
    kept = journal.find("sensitivities")
    if kept is not None:
        device = device_of(model)
        return dict(kept.document), {
            name: row_moments(cost.to(device)) for name, cost in kept.tensors.items()
        }
    sensitivity, row_costs = _measure_sensitivities(model, calibration, tensors, layer_of, workers, progress)
    costs = {name: moments.second for name, moments in row_costs.items()}
    journal.keep("sensitivities", Finished(sensitivity, costs))
    return sensitivity, row_costs


def _measure_sensitivities(
    model: nn.Module,
    calibration: Calibration,
    tensors: Tensors,
    layer_of: Mapping[str, str],
    workers: Workers | None,
    progress: Showing,
) -> tuple[dict[str, float], dict[str, LayerMoments]]:
    """What errors in each layer's outputs cost, and errors in the rows of embeddings."""
    tables = _embeddings(model, calibration, tensors.coded, tensors.source.aliases)
    layers = [*layer_of.values(), *(layer for users in tables.values() for layer in users)]
    streamed = resident_of(model) is not None
    if streamed:
        found = measure_information_by_segment(model, calibration, layers, progress=progress)
    elif workers is not None:
        found = workers.measure_information(model, calibration, layers, SENSITIVITY_SAMPLES)
    else:
        found = measure_information(model, calibration, layers, SENSITIVITY_SAMPLES, progress=progress)
    sensitivity = {name: found[layer].level for name, layer in layer_of.items()}
    row_costs: dict[str, LayerMoments] = {}
    for name, (table, *heads) in tables.items():
        seen = _moments_of_heads(heads, calibration, model, streamed)
        tied = [(seen[head].second[0], found[head].level) for head in heads]
        rows = tensors.source.entries[name].shape[0]
        row_costs[name], sensitivity[name] = embedding_moments(found[table], rows, tied)
    return sensitivity, row_costs


def _moments_of_heads(
    heads: Sequence[str], calibration: Calibration, model: nn.Module, streamed: bool
) -> dict[str, LayerMoments]:
    """Moments of the inputs of the heads that are tied to an embedding."""
    if not streamed:
        return calibration.moments(heads, model) if heads else {}
    walk = Walk(calibration, model, None, heads)
    return {head: walk.moments(head) for head in heads}


def _layers_with_moments(model: nn.Module, calibration: Calibration, coded: Sequence[str]) -> dict[str, str]:
    return {
        name: layer
        for layer in calibration.order
        if (name := weight_of(layer)) in coded and has_moments(model.get_submodule(layer))
    }


def _embeddings(
    model: nn.Module, calibration: Calibration, coded: Sequence[str], aliases: Mapping[str, str]
) -> dict[str, list[str]]:
    """Weights of embeddings that run: name -> its embedding, then the heads that are tied to it."""
    found: dict[str, list[str]] = {}
    for layer in calibration.order:
        name = aliases.get(weight_of(layer), weight_of(layer))
        module = model.get_submodule(layer)
        if name in coded and isinstance(module, nn.Embedding):
            found.setdefault(name, [layer])
        elif name in found and isinstance(module, nn.Linear):
            found[name].append(layer)
    return found


def _moment_bytes(shape: tuple[int, ...]) -> int:
    inputs = torch.Size(shape[1:]).numel()
    return 4 * inputs * inputs * (shape[0] if len(shape) > 2 and shape[1] == 1 else 1)
