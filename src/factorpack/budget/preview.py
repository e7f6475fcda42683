"""`plan`: what `compress` would do with every tensor, its size, time and memory, without doing it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from factorpack.budget.candidates import choose_methods, curves_of
from factorpack.budget.curves import Curve, allocate, least_budget
from factorpack.budget.excerpt import excerpt_of, measure_a_few
from factorpack.budget.goals import budget_bytes, original_bytes
from factorpack.budget.meet import AIM
from factorpack.budget.planner import BudgetRequest, Planner
from factorpack.budget.stream_memory import StreamMemory, estimate_stream_memory
from factorpack.budget.tensors import Tensors, split_tensors
from factorpack.checkpoints.entry import Entry
from factorpack.errors import PlanError, while_compressing
from factorpack.format.container import file_header, stored
from factorpack.format.schema import TensorRow
from factorpack.methods import Method, Scalar
from factorpack.planning.families import DEFAULT_METHOD, resolve_rules
from factorpack.planning.rules import Choice, Rules
from factorpack.quantize.uniform import MAX_STORED_BITS
from factorpack.size import fp32_bytes, words
from factorpack.source import Checkpoint, Source, open_source

BUDGET_FACTOR, BUDGET_BUFFER, BEYOND_BUFFER = 52.0, 380e6, 7.0
"""Peak bytes per byte in FP32 for a budget, which tries several steps at once while a buffer has room."""
LOAD_FACTOR = 2.0
"""Beside all weights, for the one that is being decoded."""
WHOLE_RUN = 1.3
"""Seconds of planning, coding and closing the gap, per second of planning alone: as measured."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What one tensor would get."""

    name: str
    shape: tuple[int, ...]
    words: str
    """The encoding in words."""
    note: str
    """Why, where a rule and not the caller chose it."""
    source_bytes: int
    """In the type it has now."""
    bytes: int
    """Estimated, in the file."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Preview:
    """What `plan` returns: estimates, but for the budget and the smallest size."""

    tensors: tuple[TensorPlan, ...]
    header_bytes: int
    original_bytes: int
    """In FP32, what ratios are counted against."""
    compress_peak_bytes: int
    load_peak_bytes: int
    recipe: str = ""
    """The recipe that was followed, by name or path; empty without one."""
    budget_bytes: int | None = None
    smallest_bytes: int | None = None
    """With a budget: the file in which every weight is zero. Nothing smaller is possible."""
    planner: Planner | None = None
    stream: StreamMemory | None = None
    """With `samples`: memory of a calibrated run that reads the model block by block."""

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + sum(tensor.bytes for tensor in self.tensors)

    @property
    def file_ratio(self) -> float:
        return self.original_bytes / self.file_bytes

    @property
    def seconds(self) -> float:
        return sum(tensor.seconds for tensor in self.tensors)


def plan(
    source: Checkpoint,
    method: Method | None = None,
    *,
    key: str | None = None,
    ratio: float | None = None,
    max_bytes: int | None = None,
    layers: Mapping[str, Method] | None = None,
    exclude: Sequence[str] = (),
    recipe: str | Path | None = None,
    planner: Planner | None = None,
    samples: int | None = None,
    length: int = 2048,
) -> Preview:
    """Estimates what `compress` would do with the same arguments. Nothing is written.

    Sizes and seconds come from encoding an excerpt of every weight, 65,536 values of it or a few more, for no
    more than three weights of the same shape. Memory is that of the largest weight times a measured factor.
    With a budget the estimate is from the weights alone: calibration data would distribute the same bytes
    differently, and take longer. With `samples`, of `length` tokens each, the result's `stream` has the memory
    of a calibrated run that reads a transformers folder block by block.

    >>> print(fp.plan("resnet18.safetensors", ratio=12).file_bytes)  # doctest: +SKIP
    """
    opened = open_source(source, key).say()
    budgets = [budget for budget in (ratio, max_bytes) if budget is not None]
    if len(budgets) + (method is not None) > 1:
        raise PlanError("give one of a method, ratio and max_bytes")
    if samples is not None and not (budgets and isinstance(source, str | Path)):
        raise PlanError(
            "samples are for streaming a transformers folder into a budget: give ratio or max_bytes"
        )
    name, rules = resolve_rules(recipe, opened, method, layers or {}, exclude, DEFAULT_METHOD, bool(budgets))
    if not budgets:
        return _preview(opened, _by_rules(opened, rules), name)
    wanted, planner = budget_bytes(opened, ratio, max_bytes), planner or Planner()
    request = BudgetRequest(opened, None, None, planner, rules.layers, rules.exclude, progress=False)
    split = split_tensors(request)
    tensors, smallest = split.for_bytes(wanted), split.for_bytes(0).smallest_bytes
    preview = _preview(opened, _by_budget(tensors, planner, wanted), name)
    preview = replace(preview, budget_bytes=wanted, smallest_bytes=smallest, planner=planner)
    if samples is None or not isinstance(source, str | Path):
        return preview
    return replace(preview, stream=estimate_stream_memory(Path(source), opened, wanted, samples, length))


@dataclass(frozen=True, slots=True)
class _Estimate:
    """A tensor's row in the file's schema, with estimated bytes, its encoding in words, time and memory."""

    row: TensorRow
    words: str
    seconds: float
    peak_bytes: float


def _preview(source: Source, estimates: Mapping[str, _Estimate], recipe: str) -> Preview:
    rows = [estimate.row for estimate in estimates.values()]
    tensors = tuple(
        TensorPlan(
            name,
            source.entries[name].shape,
            estimate.words,
            estimate.row.note,
            source.entries[name].numel * source.entries[name].dtype.itemsize,
            estimate.row.stored_bytes,
            estimate.seconds,
        )
        for name, estimate in estimates.items()
    )
    entries = source.entries.values()
    largest = max((_dense_bytes(entry) for entry in entries), default=0)
    dense = sum(entry.numel * entry.dtype.itemsize for entry in entries)
    return Preview(
        tensors,
        len(file_header(rows, source.aliases)),
        original_bytes(source),
        int(max((estimate.peak_bytes for estimate in estimates.values()), default=0)),
        int(dense + LOAD_FACTOR * largest),
        recipe,
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """What one weight would get of a budget."""

    bytes: float
    tile: int
    seconds: float


def _by_rules(source: Source, rules: Rules) -> dict[str, _Estimate]:
    choices = rules.plan(source)
    found = measure_a_few(source, choices, lambda name: _estimate(name, source, choices[name]))
    return {name: replace(one, row=replace(one.row, name=name)) for name, one in found.items()}


def _estimate(name: str, source: Source, choice: Choice) -> _Estimate:
    """From encoding an excerpt of a weight."""
    weight = source.weight(name)
    started = time.perf_counter()
    with while_compressing(name):
        excerpt = excerpt_of(weight, choice.method)
        encoded = replace(choice, method=excerpt.method).encode(excerpt.weight)
    row = stored(name, encoded)[0]
    seconds = excerpt.whole_seconds(time.perf_counter() - started)
    parts = {
        part: replace(kept, stored_bytes=round(kept.stored_bytes * excerpt.part_growth(encoded, part)))
        for part, kept in row.parts.items()
    }
    grown = replace(row, parts=parts, filler_bytes=round(row.filler_bytes * excerpt.growth))
    peak = choice.method.peak_factor * _dense_bytes(source.entries[name])
    return _Estimate(grown, words(encoded), seconds, peak)


def _by_budget(tensors: Tensors, planner: Planner, max_bytes: int) -> dict[str, _Estimate]:
    """Every weight's share of a budget, and all other tensors as they will be stored."""
    source, empty = tensors.source, tensors.empty
    shares = _share_out(tensors, planner, max_bytes)
    found = {}
    for name, entry in source.entries.items():
        row = stored(name, empty[name])[0]
        if name not in shares:
            found[name] = _Estimate(row, words(empty[name]), 0.0, 0.0)
            continue
        share = shares[name]
        part = next(iter(row.parts))
        codes = max(round(share.bytes) - row.stored_bytes + row.parts[part].stored_bytes, 0)
        row = replace(row, parts={part: replace(row.parts[part], stored_bytes=codes)})
        text = f"{8 * share.bytes / entry.numel:.2f} bits per weight"
        text = text if share.tile == 1 else f"{text}, in a basis over tiles of {share.tile}"
        found[name] = _Estimate(row, text, share.seconds, _budget_peak(_dense_bytes(entry)))
    return found


def _share_out(tensors: Tensors, planner: Planner, max_bytes: int) -> dict[str, _Share]:
    overhead = tensors.overhead_bytes(max_bytes)
    bits = tensors.bits_per_weight(max_bytes - overhead)

    def measure(name: str) -> tuple[Curve, float]:
        started = time.perf_counter()
        excerpt = excerpt_of(tensors.source.weight(name), Scalar())
        with while_compressing(name):
            methods = choose_methods([excerpt.weight], planner, bits)
            (curve,) = curves_of([excerpt.weight], methods, bits)
        grown = [round(excerpt.growth * size) for size in curve.bytes]
        whole = replace(curve, bytes=grown, numel=tensors.source.entries[name].numel)
        return whole, excerpt.whole_seconds(time.perf_counter() - started)

    found = measure_a_few(tensors.source, dict.fromkeys(tensors.coded), measure)
    curves = {name: curve for name, (curve, _) in found.items()}
    steps = allocate(curves, max(AIM * max_bytes - overhead, least_budget(curves)))
    return {
        name: _Share(
            min(curve.bytes_at(steps[name]), curve.numel * MAX_STORED_BITS / 8),
            curve.tile,
            WHOLE_RUN * found[name][1],
        )
        for name, curve in curves.items()
    }


def _dense_bytes(entry: Entry) -> int:
    return fp32_bytes(entry.dtype, entry.numel)


def _budget_peak(dense: int) -> float:
    return min(BUDGET_FACTOR * dense, BUDGET_BUFFER + BEYOND_BUFFER * dense)
