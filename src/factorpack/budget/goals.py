"""Compression into a budget: a number of bytes, or the smallest file within a loss."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from math import sqrt
from typing import NamedTuple

from torch import nn

from factorpack.batches import evaluating
from factorpack.budget.curves import Curve
from factorpack.budget.divergence import measure_divergence
from factorpack.budget.journal import Journal, open_journal
from factorpack.budget.knowledge import Knowledge, learn
from factorpack.budget.made_inputs import find_inputs
from factorpack.budget.measured_curves import find_curves
from factorpack.budget.meet import meet_size
from factorpack.budget.mirrored import with_mirrored
from factorpack.budget.planner import HELD_OUT_SHARE, BudgetRequest
from factorpack.budget.sequential import SequentialCoder
from factorpack.budget.tensors import Tensors, split_tensors
from factorpack.budget.workers import Workers, open_workers
from factorpack.calibration.calibrate import Calibration, calibrate
from factorpack.calibration.synthetic import Synthetic
from factorpack.errors import PlanError
from factorpack.format.encode_ahead import Streams
from factorpack.methods.settings import check_type
from factorpack.record import Encoded
from factorpack.size import fp32_bytes
from factorpack.source import Source

LARGEST_RATIO = 1e6
FIRST_RATIO, RATIOS, LOSS_TRIES = 16.0, (2.0, 128.0), 5


class Compressed(NamedTuple):
    """Tensors, the curves they were planned on, and the streams they were measured by."""

    tensors: Mapping[str, Encoded]
    curves: Mapping[str, Curve]
    streams: Streams
    estimated_loss: float | None
    """Nats of divergence by the curves, each weight's alone, added up; None without calibration data."""


def compress_to_bytes(request: BudgetRequest, max_bytes: int) -> Compressed:
    """Tensors whose file has at most `max_bytes`, and at least 99 % of that; see `Planner` for how."""
    check_max_bytes(max_bytes)
    with _evaluating(request.model):
        tensors = split_tensors(request)
        # A budget that cannot be met is refused before there is work to lose.
        sized = tensors.for_bytes(max_bytes)
        sized.overhead_bytes(max_bytes)
        calibration = _calibration(request, tensors)
        with (
            open_journal(request.parts, tensors, request.planner, calibration) as journal,
            open_workers(request) as workers,
        ):
            knowledge = _learn(request, tensors, calibration, journal, workers)
            return _meet_bytes(request, sized, knowledge, max_bytes, journal)


def compress_to_loss(request: BudgetRequest, max_loss: float) -> Compressed:
    """The smallest file found whose predictions diverge by at most `max_loss` nats on held-out inputs.

    It compresses the whole model at a handful of sizes, and takes as many times longer than a ratio.
    """
    if not max_loss > 0 or request.calibration is None or request.model is None:
        raise PlanError(f"max_loss is {max_loss}: expected a number above 0, a model, and calibration data")
    with _evaluating(request.model):
        tensors = split_tensors(request)
        given = _calibration(request, tensors)
        assert given is not None
        with (
            open_journal(request.parts, tensors, request.planner, given) as journal,
            open_workers(request) as workers,
        ):
            return _search_loss(request, tensors, given, max_loss, journal.after("max_loss"), workers)


def _search_loss(
    request: BudgetRequest,
    tensors: Tensors,
    given: Calibration,
    max_loss: float,
    journal: Journal,
    workers: Workers | None,
) -> Compressed:
    """Halves the range of ratios between one that is good enough and one that is not."""
    assert request.model is not None
    calibration, held_out = given.split(HELD_OUT_SHARE)
    knowledge = _learn(request, tensors, calibration, journal, workers)
    original = original_bytes(request.source)
    best: Compressed | None = None
    (low, high), ratio = RATIOS, FIRST_RATIO
    for _ in range(LOSS_TRIES):
        try:
            found = _meet_bytes(request, tensors, knowledge, int(original / ratio), journal)
            loss = measure_divergence(request.model, found.tensors, request.source.aliases, held_out)
        except PlanError:  # smaller than headers allow
            loss = float("inf")
        if loss <= max_loss:
            low, best = ratio, found
        else:
            high = ratio
        ratio = sqrt(low * high)
    if best is None:
        raise PlanError(
            f"at {high:.3g} times smaller the predictions still diverge by more than {max_loss} nats"
        )
    return best


def _meet_bytes(
    request: BudgetRequest, tensors: Tensors, knowledge: Knowledge, max_bytes: int, journal: Journal
) -> Compressed:
    tensors = tensors.for_bytes(max_bytes)
    overhead = tensors.overhead_bytes(max_bytes)
    bits = tensors.bits_per_weight(max_bytes - overhead)
    curves = find_curves(tensors, knowledge, bits, request.curves, request.progress, journal)
    coder = SequentialCoder(tensors, knowledge, request.progress, journal)
    tensors_in_file = meet_size(coder, curves, request.planner, max_bytes, overhead)
    loss = None
    if knowledge.sensitivity:
        loss = sum(curves[name].loss_at(coder.step_of(name)) for name in knowledge.sensitivity)
    return Compressed(tensors_in_file, curves, coder.streams, loss)


def _learn(
    request: BudgetRequest,
    tensors: Tensors,
    calibration: Calibration | None,
    journal: Journal,
    workers: Workers | None,
) -> Knowledge:
    """What the calibration data show, with mirrored copies of images where they are wanted."""
    if calibration is not None and request.model is not None:
        calibration = with_mirrored(calibration, request.model, request.planner.mirror)
    return learn(tensors, request.planner, calibration, journal, workers, request.progress)


def check_max_bytes(max_bytes: int) -> None:
    check_type("max_bytes", max_bytes, int)
    if max_bytes < 1:
        raise PlanError(f"max_bytes is {max_bytes}, expected at least 1", found=max_bytes, allowed=1)


def budget_bytes(source: Source, ratio: float | None, max_bytes: int | None = None) -> int:
    """`max_bytes` where it is given, else bytes of a file `ratio` times smaller than the checkpoint in FP32."""
    if not source.entries:
        raise PlanError("a budget has nothing to divide: the source has no tensors")
    if max_bytes is not None:
        return max_bytes
    if not isinstance(ratio, int | float) or not 1 < ratio < LARGEST_RATIO:
        raise PlanError(
            f"ratio is {ratio!r}, expected a number above 1 and below {LARGEST_RATIO:,.0f}",
            found=ratio,
            allowed=[1, LARGEST_RATIO],
        )
    return int(original_bytes(source) / ratio)


def original_bytes(source: Source) -> int:
    """What ratios are counted against: the checkpoint in FP32."""
    return sum(fp32_bytes(entry.dtype, entry.numel) for entry in source.entries.values())


def _calibration(request: BudgetRequest, tensors: Tensors) -> Calibration | None:
    given = request.calibration
    if given is None or isinstance(given, Calibration):
        return given
    if request.model is None:
        raise PlanError("calibration runs a model: give one, not only its weights")
    batches = find_inputs(request, tensors, given) if isinstance(given, Synthetic) else given
    return calibrate(request.model, batches, request.planner.samples)


def _evaluating(model: nn.Module | None) -> AbstractContextManager[None]:
    return nullcontext() if model is None else evaluating(model)
