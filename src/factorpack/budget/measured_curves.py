"""The curves of all weights of a model: measured, refined on held-out inputs, kept in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from factorpack.budget.candidates import choose_methods, curves_of, encode_with_step
from factorpack.budget.curves import Curve, allocate, fill_unknown, load_curves, save_curves
from factorpack.budget.journal import NOTHING_KEPT, Finished, Journal, identify
from factorpack.budget.knowledge import Knowledge
from factorpack.budget.planner import Planner
from factorpack.budget.tensors import Tensors
from factorpack.budget.trial import REFINEMENTS, SingleWeightTrial, correct_curve
from factorpack.errors import FormatError, while_compressing
from factorpack.format.checked_file import say_damaged
from factorpack.methods import SecondOrder
from factorpack.progress import Progress
from factorpack.weight import Weight

TOGETHER = 1 << 24
"""Elements of weights and their inputs' moments that are planned at once."""
KEPT_BYTES = 4 << 30
"""Plans are corrected where all weights, ready to be rounded again, fit into this much memory."""

Candidate = tuple[Weight, SecondOrder]
"""A weight, ready to be rounded at any step, and the method that does it."""


def find_curves(
    tensors: Tensors,
    knowledge: Knowledge,
    bits: float,
    file: Path | None,
    progress: bool,
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
    tensors: Tensors, knowledge: Knowledge, bits: float, progress: bool, journal: Journal
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
    tensors: Tensors, knowledge: Knowledge, bits: float, progress: bool, journal: Journal = NOTHING_KEPT
) -> dict[str, Curve]:
    """Curves measured weight by weight, then refined; the journal has those that are finished."""
    refined = knowledge.model is not None and knowledge.held_out is not None and _fits(tensors, knowledge)
    curves: dict[str, Curve] = {}
    candidates: dict[str, Candidate] = {}
    with Progress("planning", tensors.numel, progress) as bar:
        for names, moments in knowledge.original_moments(tensors):
            for some in _alike(names, tensors):
                bar.show(some[0])
                weights = {name: knowledge.weight(tensors, name, moments.get(name)) for name in some}
                curves |= _find_curves_of(weights, knowledge.planner, bits, journal)
                for name, weight in weights.items():
                    if refined and name in knowledge.sensitivity:
                        tile, trellis = curves[name].tile, curves[name].trellis
                        candidates[name] = weight, knowledge.planner.method(tile=tile, trellis=trellis)
                    bar.advance(name, weight.numel)
    curves = fill_unknown(curves, knowledge.sensitivity)
    if not refined:
        return curves
    assert knowledge.model is not None
    assert knowledge.held_out is not None
    trial = SingleWeightTrial(knowledge.model, knowledge.held_out)
    budget = bits * tensors.numel / 8
    return _refine(trial, curves, candidates, budget, knowledge.sensitivity, progress, journal)


def _find_curves_of(
    weights: Mapping[str, Weight], planner: Planner, bits: float, journal: Journal
) -> dict[str, Curve]:
    """The curves of weights that are planned together, which is how they are kept."""
    finished, first = journal.after(list(weights)), next(iter(weights))
    kept = finished.find(first)
    if kept is not None:
        return {name: Curve(**fields) for name, fields in kept.document.items()}
    for name, weight in weights.items():
        with while_compressing(name):
            weight.finite()
    together = list(weights.values())
    found = curves_of(together, choose_methods(together, planner, bits), bits)
    curves = dict(zip(weights, found, strict=True))
    finished.keep(first, Finished({name: asdict(curve) for name, curve in curves.items()}))
    return curves


def _alike(names: Sequence[str], tensors: Tensors) -> list[list[str]]:
    """Weights of one shape, which are planned together, as many as take no more memory than the largest weight may."""
    entries, groups = tensors.source.entries, []
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        by_shape.setdefault(entries[name].shape, []).append(name)
    for shape, alike in by_shape.items():
        at_once = max(1, TOGETHER // (math.prod(shape) + math.prod(shape[1:]) ** 2))
        groups += [alike[start : start + at_once] for start in range(0, len(alike), at_once)]
    return groups


def _fits(tensors: Tensors, knowledge: Knowledge) -> bool:
    """Whether the values and feedback factors of all weights fit into memory."""
    shapes = [tensors.source.entries[name].shape for name in knowledge.layer_of]
    return 4 * sum(math.prod(shape) + math.prod(shape[1:]) ** 2 for shape in shapes) <= KEPT_BYTES


def _refine(
    trial: SingleWeightTrial,
    curves: dict[str, Curve],
    candidates: Mapping[str, Candidate],
    budget: float,
    known: Mapping[str, float],
    progress: bool,
    journal: Journal,
) -> dict[str, Curve]:
    """Curves corrected by what each weight alone does at the step planned for it, and planned again."""
    measured: dict[tuple[str, int], float] = {}
    with Progress("refining", REFINEMENTS * len(candidates), progress) as bar:
        for _ in range(REFINEMENTS):
            steps = allocate(curves, budget)
            for name, candidate in candidates.items():
                bar.show(name)
                place = curves[name].nearest(steps[name])
                if (name, place) not in measured:
                    step = curves[name].steps[place]
                    measured[name, place] = _find_divergence(trial, name, candidate, step, journal)
                curves[name] = correct_curve(curves[name], place, measured[name, place])
                bar.advance(name, 1)
            curves = fill_unknown(curves, known)
    return curves


def _find_divergence(
    trial: SingleWeightTrial, name: str, candidate: Candidate, step: float, journal: Journal
) -> float:
    finished = journal.after("divergence", step)
    kept = finished.find(name)
    if kept is None:
        weight, method = candidate
        kept = Finished({"nats": trial.divergence(name, encode_with_step(weight, method, step).encoded)})
        finished.keep(name, kept)
    return float(kept.document["nats"])
