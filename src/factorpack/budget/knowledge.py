"""What calibration data show of a model: which layers run, their sensitivities, moments and norms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from factorpack.batches import device_of
from factorpack.budget.embeddings import embedding_moments, row_moments, word_information, word_weights
from factorpack.budget.journal import NOTHING_KEPT, Finished, Journal
from factorpack.budget.norms import norms_after
from factorpack.budget.planner import HELD_OUT_SHARE, Planner
from factorpack.budget.segment_gradients import measure_information_by_segment
from factorpack.budget.sensitivity import Information, measure_information
from factorpack.budget.tensors import Tensors
from factorpack.budget.views import View, moments_of_views, sees_few, views_of
from factorpack.budget.workers import Workers
from factorpack.calibration.calibrate import Calibration
from factorpack.calibration.walk import Walk
from factorpack.passes.resident import resident_of
from factorpack.progress import Showing
from factorpack.record import LayerMoments, bias_of, weight_of
from factorpack.solve.moments import has_moments
from factorpack.weight import Weight

SENSITIVITY_SAMPLES = 256
FEWEST_TO_SPLIT = 16
"""With fewer inputs, none are held out to refine the plan on."""
MOMENT_BYTES = 1 << 30
"""Moments of as many layers as fit into this are gathered in one pass over the calibration data."""
NARROWEST = 64
"""Rows of fewer values are not worth a step each."""
COSTS, WEIGHTS = "cost of ", "rows of "
"""What comes before the names of tensors that are kept with sensitivities."""


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """What is known of a model's weights; without calibration data, nothing."""

    planner: Planner
    model: nn.Module | None = None
    calibration: Calibration | None = None
    """Inputs to plan on."""
    held_out: Calibration | None = None
    """Inputs held out while it is planned, to measure on."""
    all_inputs: Calibration | None = None
    """Both, which weights are coded on: nothing is measured after that."""
    layer_of: Mapping[str, str] = field(default_factory=dict)
    """Weights of layers that run on the data and have moments -> layer, in execution order."""
    norm_of: Mapping[str, str] = field(default_factory=dict)
    """Layer -> the batch norm that follows it and may be corrected."""
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    restores_mean: Collection[str] = ()
    """Weights whose layers' mean outputs are restored, by the norm that follows or a bias."""
    views: Mapping[str, Sequence[View]] = field(default_factory=dict)
    """Layer -> what it is shown beside the images, if it sees one vector for each."""
    row_costs: Mapping[str, LayerMoments] = field(default_factory=dict)
    """What errors in the rows of an embedding cost: rows are looked up, not multiplied."""
    row_weights: Mapping[str, Tensor] = field(default_factory=dict)
    """How much errors in each row of a table of words, or of the head that predicts them, count."""
    workers: Workers | None = None
    """Who measures; None is this process."""

    def order(self, coded: Sequence[str]) -> list[str]:
        """Weights whose inputs are unknown, then the others in execution order."""
        return [*(name for name in coded if name not in self.layer_of), *self.layer_of]

    def weight(self, tensors: Tensors, name: str, moments: LayerMoments | None) -> Weight:
        """A weight with all that is known of it, as far as the planner uses it."""
        inputs = (self.row_costs.get(name) or moments) if self.planner.second_order else None
        if inputs is not None and name in self.row_weights:
            inputs = replace(inputs, row_weights=self.row_weights[name])
        if inputs is not None and name in self.restores_mean:
            inputs = replace(inputs, restores_mean=True)
        return tensors.source.weight(name, inputs, self.sensitivity.get(name))

    def walk(self, compressed: nn.Module | None) -> Walk | None:
        """A walk along the layers on all inputs, in the network as compressed so far beside the original."""
        return self._walk(self.all_inputs, compressed if self.planner.sequential else None)

    def _walk(self, inputs: Calibration | None, compressed: nn.Module | None) -> Walk | None:
        if inputs is None or self.model is None:
            return None
        return Walk(inputs, self.model, compressed, list(self.layer_of.values()))

    def original_moments(self, tensors: Tensors) -> Iterator[tuple[list[str], dict[str, LayerMoments]]]:
        """Groups of weights in execution order, with the original network's moments where they are used."""
        walk = self._walk(self.calibration, None) if self.planner.second_order else None
        for group in self._groups(tensors, walk):
            layers = {name: self.layer_of[name] for name in group if name in self.layer_of}
            found = walk.collect(list(layers.values())) if walk is not None and layers else {}
            yield (
                group,
                {
                    name: self._with_views(layer, found[layer], self.calibration, None)
                    for name, layer in layers.items()
                    if layer in found
                },
            )

    def moments(self, walk: Walk, layer: str, compressed: nn.Module | None) -> LayerMoments:
        """Moments of a layer's inputs on all inputs, in the network as compressed so far beside the original."""
        compressed = compressed if self.planner.sequential else None
        return self._with_views(layer, walk.moments(layer), self.all_inputs, compressed)

    def _with_views(
        self, layer: str, moments: LayerMoments, inputs: Calibration | None, compressed: nn.Module | None
    ) -> LayerMoments:
        """The same, with views of the images where the layer has seen few vectors."""
        views = self.views.get(layer)
        if views is None or self.model is None or inputs is None or not sees_few(moments, inputs):
            return moments
        return moments.joined(moments_of_views(views, inputs, layer, self.model, compressed))

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
    held_out, all_inputs = None, calibration
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
    restored = {
        name
        for name, layer in layer_of.items()
        if planner.correct_means
        and planner.about_means
        and _keeps_mean(tensors, model, layer, norm_of.get(layer))
    }
    views = {}
    if planner.views and planner.second_order and not streamed:
        sizes = [tensors.source.entries[name].numel for name in tensors.coded]
        views = views_of(all_inputs, model, layer_of.values(), sizes)
    known = Knowledge(
        planner,
        model,
        calibration,
        held_out,
        all_inputs,
        layer_of,
        norm_of,
        restores_mean=restored,
        views=views,
        workers=workers,
    )
    return _know_sensitivities(known, tensors, journal, progress) if planner.equal_slope else known


def _keeps_mean(tensors: Tensors, model: nn.Module, layer: str, norm: str | None) -> bool:
    """Whether something behind a layer can restore its mean output."""
    if norm is not None and getattr(model.get_submodule(norm), "running_mean", None) is not None:
        return True
    has_bias = isinstance(getattr(model.get_submodule(layer), "bias", None), Tensor)
    return has_bias and not tensors.is_fixed_by_caller(bias_of(weight_of(layer)))


def _know_sensitivities(known: Knowledge, tensors: Tensors, journal: Journal, progress: Showing) -> Knowledge:
    """With sensitivities and what rows cost: those of the run that is resumed, or measured."""
    kept = journal.find("sensitivities")
    if kept is None:
        sensitivity, tensors_of = _measure_sensitivities(known, tensors, progress)
        kept = Finished(sensitivity, tensors_of)
        journal.keep("sensitivities", kept)
    assert known.model is not None
    device = device_of(known.model)
    found = {name: tensor.to(device) for name, tensor in kept.tensors.items()}
    costs, weights = (
        {name.removeprefix(kind): value for name, value in found.items() if name.startswith(kind)}
        for kind in (COSTS, WEIGHTS)
    )
    row_costs = {name: row_moments(cost) for name, cost in costs.items()}
    return replace(known, sensitivity=dict(kept.document), row_costs=row_costs, row_weights=weights)


def _measure_sensitivities(
    known: Knowledge, tensors: Tensors, progress: Showing
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """What errors in each layer's outputs cost; errors in the rows of embeddings; and how much each row counts."""
    model, calibration, layer_of, workers = known.model, known.calibration, known.layer_of, known.workers
    assert model is not None
    assert calibration is not None
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
    of_rows: dict[str, Tensor] = {}
    # The Fisher information of the rows of the last layer, if it predicts words, and of tables of these.
    last, words = next(reversed(calibration.order), ""), dict[str, Tensor]()
    for name, (table, *heads) in tables.items():
        seen = _moments_of_heads(heads, calibration, model)
        tied = [(seen[head].second[0], found[head].level) for head in heads]
        rows = tensors.source.entries[name].shape[0]
        moments, sensitivity[name] = embedding_moments(found[table], rows, tied)
        of_rows[COSTS + name] = moments.second
        if last in found and _rows(found[last]) == rows:
            inputs = seen[last].second[0] if last in seen else None
            words[name] = word_information(found[table], found[last], inputs)
    if words and weight_of(last) in layer_of:
        words[weight_of(last)] = word_information(None, found[last], None)
    for name, information in words.items() if known.planner.word_frequencies else ():
        if tensors.source.entries[name].shape[1] >= NARROWEST:
            of_rows[WEIGHTS + name], share = word_weights(information)
            sensitivity[name] *= share
    return sensitivity, of_rows


def _rows(found: Information) -> int:
    return 0 if found.rows is None else len(found.rows)


def _moments_of_heads(
    heads: Sequence[str], calibration: Calibration, model: nn.Module
) -> dict[str, LayerMoments]:
    """Moments of the inputs of the heads that are tied to an embedding."""
    if not heads:
        return {}
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
