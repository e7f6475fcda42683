"""How a budget would be shared out among the weights, by curves of their samples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from factorpack.budget.budgeter import AIM, Budgeter
from factorpack.budget.candidates import best_pose, curve
from factorpack.budget.curves import Curve, allocate
from factorpack.budget.excerpt import of_a_few, sample_of
from factorpack.budget.planner import Planner, Work
from factorpack.errors import while_compressing
from factorpack.format.packed_file import file_bytes
from factorpack.methods import Scalar
from factorpack.planning.rules import Rules
from factorpack.quantize.uniform import MAX_STORED_BITS
from factorpack.record import Encoded
from factorpack.source import Source

WHOLE_RUN = 1.3
"""Seconds of planning, coding and closing the gap, for a second of planning alone: as measured."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one weight would get of a budget."""

    bytes: float
    tile: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Planned:
    """A budget shared out."""

    weights: Mapping[str, Share]
    empty: Mapping[str, Encoded]
    """The smallest file's tensors: those that are kept as they will be, the weights zero."""
    smallest_bytes: int
    planner: Planner


def planned(source: Source, rules: Rules, planner: Planner, max_bytes: int) -> Planned:
    work = Work(source, None, None, planner, rules.layers, rules.exclude, progress=False)
    budgeter = Budgeter(work, None)
    overhead = budgeter.overhead(max_bytes)
    empty = budgeter.empty()
    curves, seconds = _curves(source, budgeter.coded, budgeter.bits(max_bytes - overhead), planner)
    least = 1.01 * sum(one.bytes[-1] for one in curves.values())
    steps = allocate(curves, max(AIM * max_bytes - overhead, least))
    weights = {
        name: Share(
            min(one.bytes_at(steps[name]), one.numel * MAX_STORED_BITS / 8),
            one.tile,
            WHOLE_RUN * seconds[name],
        )
        for name, one in curves.items()
    }
    return Planned(weights, empty, file_bytes(empty, source.aliases), planner)


def _curves(
    source: Source, coded: Sequence[str], bits: float, planner: Planner
) -> tuple[dict[str, Curve], dict[str, float]]:
    """Curves of the weights from those of their samples, and how long the weights' own would take."""

    def measured(name: str) -> tuple[Curve, float]:
        started = time.perf_counter()
        sample = sample_of(source.entries[name].load(), Scalar(), source.transposed_groups.get(name, 0))
        groups = source.transposed_groups.get(name, 0) if sample.growth == 1.0 else 0
        with while_compressing(name):
            posed = best_pose(sample.values, groups, None, None, bits, planner.rounding)
            of_sample, _ = curve(posed, bits)
        grown = [round(sample.growth * size) for size in of_sample.bytes]
        whole = replace(of_sample, bytes=grown, numel=source.entries[name].numel)
        return whole, sample.whole_seconds(time.perf_counter() - started)

    found = of_a_few(source, dict.fromkeys(coded), measured)
    return {name: one for name, (one, _) in found.items()}, {name: took for name, (_, took) in found.items()}
