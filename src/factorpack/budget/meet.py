"""Compression into a budget: a number of bytes, or the loss they may cost."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from math import sqrt

import torch
from torch import nn

from factorpack.batches import evaluating, forward
from factorpack.budget.budgeter import Budgeter
from factorpack.budget.curves import Curve
from factorpack.budget.divergence import divergence_of
from factorpack.budget.outputs import answer_of
from factorpack.budget.planner import HELD_SHARE, Work
from factorpack.calibrate import Calibration, calibrate
from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.methods.protocol import check_type
from factorpack.record import Encoded
from factorpack.size import fp32_bytes
from factorpack.source import Source

FIRST_RATIO, RATIOS = 16.0, (2.0, 128.0)


def compress_to_budget(work: Work, max_bytes: int) -> tuple[dict[str, Encoded], dict[str, Curve]]:
    """Tensors whose file has at most `max_bytes`, and at least 99 % of that; see `Planner` for how."""
    check_type("max_bytes", max_bytes, int)
    if max_bytes < 1:
        raise PlanError(f"max_bytes is {max_bytes}, expected at least 1")
    with _evaluating(work.model):
        return Budgeter(work, _calibration(work)).run(max_bytes)


def compress_to_loss(work: Work, max_loss: float) -> tuple[dict[str, Encoded], dict[str, Curve]]:
    """The smallest file found whose answers diverge by at most `max_loss` nats on inputs kept aside.

    Whole compressions at a handful of sizes: it takes as many times longer than a ratio.
    """
    if not max_loss > 0 or work.calibration is None or work.model is None:
        raise PlanError(f"max_loss is {max_loss}: expected a number above 0, a model, and calibration data")
    with _evaluating(work.model):
        whole = _calibration(work)
        assert whole is not None
        calibration, held = whole.split(HELD_SHARE)
        budgeter = Budgeter(work, calibration)
        original = source_bytes(work.source)
        best: tuple[dict[str, Encoded], dict[str, Curve]] | None = None
        (low, high), ratio = RATIOS, FIRST_RATIO
        for _ in range(5):
            try:
                found = budgeter.run(int(original / ratio))
                enough = divergence(work.model, found[0], work.source.aliases, held) <= max_loss
            except PlanError:  # smaller than headers allow
                enough = False
            if enough:
                low, best = ratio, found
            else:
                high = ratio
            ratio = sqrt(low * high)
        if best is None:
            raise PlanError(
                f"at {high:.3g} times smaller the answers still diverge by more than {max_loss} nats"
            )
        return best


def budget_bytes(source: Source, ratio: float | None, max_bytes: int | None = None) -> int:
    """`max_bytes` where it is given, else bytes of a file `ratio` times smaller than the checkpoint in FP32."""
    if max_bytes is not None:
        return max_bytes
    if not isinstance(ratio, int | float) or not 1 < ratio < 1e6:
        raise PlanError(f"ratio is {ratio!r}, expected a number above 1")
    return int(source_bytes(source) / ratio)


def divergence(
    model: nn.Module, tensors: Mapping[str, Encoded], aliases: Mapping[str, str], held: Calibration
) -> float:
    """Mean Kullback-Leibler divergence, in nats, of the packed model's answers from the original's."""
    packed = copy.deepcopy(model)
    state = {name: decode(encoded) for name, encoded in tensors.items()}
    packed.load_state_dict(state | {alias: state[target] for alias, target in aliases.items()})
    total, count = 0.0, 0
    for batch in held.batches:
        with torch.no_grad():
            wanted, found = (answer_of(forward(net, batch), batch) for net in (model, packed))
        lost, answers = divergence_of(wanted, found)
        total, count = total + lost, count + answers
    return total / count


def _calibration(work: Work) -> Calibration | None:
    if work.calibration is None or isinstance(work.calibration, Calibration):
        return work.calibration
    if work.model is None:
        raise PlanError("calibration runs a model: give one, not only its weights")
    return calibrate(work.model, work.calibration, work.planner.samples)


def _evaluating(model: nn.Module | None) -> AbstractContextManager[None]:
    return nullcontext() if model is None else evaluating(model)


def source_bytes(source: Source) -> int:
    """What ratios are counted against: the checkpoint in FP32."""
    return sum(fp32_bytes(entry.dtype, entry.numel) for entry in source.entries.values())
