"""The curves of all weights of a model: measured, refined on held-out inputs, kept in a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from factorpack.batches import device_of
from factorpack.budget.candidates import plan_together
from factorpack.budget.coding import at_once, encode_with_steps, works_together
from factorpack.budget.corrections import Corrections
from factorpack.budget.curves import Curve, fill_unknown, load_curves, save_curves
from factorpack.budget.journal import NOTHING_KEPT, Finished, Journal, identify
from factorpack.budget.knowledge import Knowledge
from factorpack.budget.phases import planning_work
from factorpack.budget.planner import Planner
from factorpack.budget.tensors import Tensors
from factorpack.budget.trial import REFINEMENTS, SingleWeightTrial
from factorpack.budget.workers import Workers
from factorpack.errors import FormatError
from factorpack.format.checked_file import say_damaged
from factorpack.methods import SecondOrder
from factorpack.progress import Progress, Showing
from factorpack.weight import Weight

KEPT_BYTES = 4 << 30
"""Plans are corrected where all weights, ready to be rounded again, fit into this much memory."""

Group = Mapping[str, Weight]
"""Weights that are planned together."""
Measure = Callable[[Mapping[str, float]], Iterable[tuple[str, float]]]
"""Names and steps -> names and the divergences of the models in which that weight alone is rounded at its step."""


def find_curves(
    tensors: Tensors,
    knowledge: Knowledge,
    bits: float,
    file: Path | None,
    progress: Showing,
    journal: Journal = NOTHING_KEPT,
) -> dict[str, Curve]:
    """A curve for every weight, about `bits` per weight, or those kept in a file or by the run that is resumed."""
    if file is None:
        return _resume_curves(tensors, knowledge, bits, progress, journal)
    fingerprint = identify(tensors, knowledge.planner, knowledge.calibration, knowledge.held_out)
    kept = None
    try:
        kept = load_curves(file, fingerprint)
    except FormatError as error:
        say_damaged(file, "every curve", error)
    if kept is None:
        kept = _resume_curves(tensors, knowledge, bits, progress, journal)
        save_curves(file, kept, fingerprint)
    return kept


def _resume_curves(
    tensors: Tensors, knowledge: Knowledge, bits: float, progress: Showing, journal: Journal
) -> dict[str, Curve]:
    """All curves that the journal has, or measures those that it lacks."""
    finished = journal.after("all curves", bits)
    kept = finished.find("curves")
    if kept is not None:
        return {name: Curve(**fields) for name, fields in kept.document.items()}
    curves = measure_curves(tensors, knowledge, bits, progress, journal.after("curve", bits))
    finished.keep("curves", Finished({name: asdict(curve) for name, curve in curves.items()}))
    return curves


def measure_curves(
    tensors: Tensors, knowledge: Knowledge, bits: float, progress: Showing, journal: Journal = NOTHING_KEPT
) -> dict[str, Curve]:
    """Curves measured weight by weight, then refined; the journal has those that are finished."""
    refined = knowledge.model is not None and knowledge.held_out is not None and _fits(tensors, knowledge)
    curves: dict[str, Curve] = {}
    ready: dict[str, Weight] = {}
    calibrated = knowledge.calibration is not None
    total = sum(planning_work(tensors.source.entries[name].numel, calibrated) for name in tensors.coded)
    with Progress("planning", total, progress) as bar:
        for names, moments in knowledge.original_moments(tensors):
            groups = (
                {name: knowledge.weight(tensors, name, moments.get(name)) for name in some}
                for some in _alike(names, tensors)
            )
            for weights, found in _find_curves_of(groups, knowledge, bits, journal, refined):
                curves |= found
                ready |= weights if refined else {}
                for name, curve in found.items():
                    bar.advance(name, planning_work(curve.numel, calibrated))
    # Along a trellis, codes of the same error take longer to find.
    methods = {
        name: knowledge.planner.method(tile=curve.tile, price=curve.price)
        for name, curve in curves.items()
        if name in knowledge.sensitivity
    }
    curves = fill_unknown(curves, knowledge.sensitivity)
    if not refined:
        return curves
    measure = _measuring(knowledge, ready, methods)
    budget = bits * tensors.numel / 8
    return _refine(measure, curves, list(methods), budget, knowledge.sensitivity, progress, journal)


def _find_curves_of(
    groups: Iterable[Group], knowledge: Knowledge, bits: float, journal: Journal, refined: bool
) -> Iterator[tuple[Group, dict[str, Curve]]]:
    """Groups of weights, empty where workers have them, and their curves: kept, or measured and then kept."""
    if knowledge.workers is not None:
        for found in _spread_curves(groups, knowledge.workers, knowledge.planner, bits, journal, refined):
            yield {}, found
        return
    for weights in groups:
        kept = _kept_curves(weights, journal)
        if kept is None:
            kept = _keep_curves(plan_together(weights, knowledge.planner, bits), journal)
        yield weights, kept


def _spread_curves(
    groups: Iterable[Group], workers: Workers, planner: Planner, bits: float, journal: Journal, refined: bool
) -> list[dict[str, Curve]]:
    """The curves of groups of weights, measured by workers, in the order of the groups."""
    curves: dict[str, dict[str, Curve] | None] = {}
    for weights in groups:
        first = next(iter(weights))
        curves[first] = _kept_curves(weights, journal)
        if refined or curves[first] is None:
            workers.put(weights)
    missing = [first for first, kept in curves.items() if kept is None]
    for found in workers.measure_curves(missing, planner, bits):
        curves[next(iter(found))] = _keep_curves(found, journal)
    return [found for found in curves.values() if found is not None]


def _kept_curves(weights: Group, journal: Journal) -> dict[str, Curve] | None:
    """What the journal has of weights that are planned together, which is how they are kept."""
    kept = journal.after(list(weights)).find(next(iter(weights)))
    return None if kept is None else {name: Curve(**fields) for name, fields in kept.document.items()}


def _keep_curves(curves: dict[str, Curve], journal: Journal) -> dict[str, Curve]:
    finished = Finished({name: asdict(curve) for name, curve in curves.items()})
    journal.after(list(curves)).keep(next(iter(curves)), finished)
    return curves


def _alike(names: Sequence[str], tensors: Tensors) -> list[list[str]]:
    """Weights of one shape, which are planned together, as many as take no more memory than the largest weight may."""
    entries, groups = tensors.source.entries, []
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        by_shape.setdefault(entries[name].shape, []).append(name)
    for shape, alike in by_shape.items():
        most = at_once(shape)
        groups += [alike[start : start + most] for start in range(0, len(alike), most)]
    return groups


def _fits(tensors: Tensors, knowledge: Knowledge) -> bool:
    """Whether the values and feedback factors of all weights fit into memory."""
    shapes = [tensors.source.entries[name].shape for name in knowledge.layer_of]
    return 4 * sum(math.prod(shape) + math.prod(shape[1:]) ** 2 for shape in shapes) <= KEPT_BYTES


def _measuring(knowledge: Knowledge, ready: Group, methods: Mapping[str, SecondOrder]) -> Measure:
    """What measures divergences: workers, or a trial in this process of weights that are ready to be rounded."""
    if knowledge.workers is not None:
        measure = knowledge.workers.measure_divergences
        return lambda wanted: measure({name: (methods[name], step) for name, step in wanted.items()})
    assert knowledge.model is not None
    assert knowledge.held_out is not None
    trial = SingleWeightTrial(knowledge.model, knowledge.held_out)
    together = works_together(device_of(knowledge.model))

    def measure_here(wanted: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        for names in [list(wanted)] if together else [[name] for name in wanted]:
            weights, by = [ready[name] for name in names], [methods[name] for name in names]
            encoded = encode_with_steps(weights, by, [wanted[name] for name in names])
            yield from trial.divergences(dict(zip(names, encoded, strict=True)), ready)

    return measure_here


def _refine(
    measure: Measure,
    curves: dict[str, Curve],
    names: Sequence[str],
    budget: float,
    known: Mapping[str, float],
    progress: Showing,
    journal: Journal,
) -> dict[str, Curve]:
    """Curves corrected by what each weight alone does at the step planned for it, and planned again."""
    corrections, measured = Corrections(curves, known), set[tuple[str, int]]()
    with Progress("refining", REFINEMENTS * len(names), progress) as bar:
        for _ in range(REFINEMENTS):
            steps = corrections.plan(budget)
            places = {name: curves[name].nearest(steps[name]) for name in names}
            wanted = {
                name: curves[name].steps[place]
                for name, place in places.items()
                if (name, place) not in measured
            }
            bar.advance("", len(places) - len(wanted))
            for name, nats in _find_divergences(measure, wanted, journal):
                corrections.add(name, places[name], nats)
                measured.add((name, places[name]))
                bar.advance(name, 1)
    corrections.plan(budget)
    return corrections.curves()


def _find_divergences(
    measure: Measure, wanted: Mapping[str, float], journal: Journal
) -> Iterator[tuple[str, float]]:
    """What each weight alone does at a step: what the journal has, then what it lacks."""
    missing: dict[str, float] = {}
    for name, step in wanted.items():
        kept = journal.after("divergence", step).find(name)
        if kept is None:
            missing[name] = step
        else:
            yield name, float(kept.document["nats"])
    for name, nats in measure(missing):
        journal.after("divergence", missing[name]).keep(name, Finished({"nats": nats}))
        yield name, nats
