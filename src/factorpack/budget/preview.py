"""`plan`: what `compress` would do with every tensor, and what that would take, without doing it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from factorpack.budget.excerpt import of_a_few, sample_of
from factorpack.budget.meet import budget_bytes, source_bytes
from factorpack.budget.planner import Planner
from factorpack.budget.shares import Planned, planned
from factorpack.errors import PlanError, while_compressing
from factorpack.format.container import head_bytes, stored
from factorpack.format.schema import TensorRow
from factorpack.methods import Method
from factorpack.planning.families import DEFAULT_METHOD, asked
from factorpack.planning.rules import Choice, Rules
from factorpack.size import fp32_bytes, words
from factorpack.source import Checkpoint, Entry, Source, open_source

COMPRESS_FACTOR = {
    "keep": 3.0,
    "scalar": 5.0,
    "qspca": 12.0,
    "nncodec": 17.0,
    "second_order": 17.0,
    "aq": 19.0,
    "vq": 6.0,
    "svd": 6.0,
    "lsq": 6.0,
    "prune": 6.0,
    "ttq": 8.0,
}
"""Bytes at the peak for one of the largest weight in FP32, by method: as measured on 2 to 8 million numbers."""
USUAL_FACTOR = 12.0
BUDGET_FACTOR, BUDGET_BUFFER, BEYOND_BUFFER = 52.0, 380e6, 7.0
"""The same of a budget, which looks at several steps at once as long as a buffer has room for them."""
LOAD_FACTOR = 2.0
"""Beside all weights, of the one that is being decoded."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """What one tensor would get."""

    name: str
    shape: tuple[int, ...]
    words: str
    """The encoding, as a person would say it."""
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
    ratio: float | None = None,
    max_bytes: int | None = None,
    layers: Mapping[str, Method] | None = None,
    exclude: Sequence[str] = (),
    recipe: str | Path | None = None,
    planner: Planner | None = None,
) -> Preview:
    """What `compress` with the same arguments would come to. Nothing is written.

    Sizes and seconds come from encoding a sample of every weight, 65,536 numbers of it or a little more,
    and of no more than three weights of the same shape; memory is the largest weight's times a measured
    factor. With a budget they are those from the weights alone: calibration data would share the same bytes
    out in another way, and take longer.

    >>> print(fp.plan("resnet18.safetensors", ratio=12).file_bytes)  # doctest: +SKIP
    """
    opened = open_source(source)
    budgets = [budget for budget in (ratio, max_bytes) if budget is not None]
    if len(budgets) + (method is not None) > 1:
        raise PlanError("give one of a method, ratio and max_bytes")
    name, rules = asked(recipe, opened, method, layers or {}, exclude, DEFAULT_METHOD, bool(budgets))
    if not budgets:
        return _preview(opened, _by_rules(opened, rules), name)
    wanted = budget_bytes(opened, ratio, max_bytes)
    shared_out = planned(opened, rules, planner or Planner(), wanted)
    preview = _preview(opened, _by_budget(opened, shared_out), name)
    return replace(
        preview,
        budget_bytes=wanted,
        smallest_bytes=shared_out.smallest_bytes,
        planner=shared_out.planner,
    )


@dataclass(frozen=True, slots=True)
class _Estimate:
    """A tensor's row in the file's schema, with its estimated bytes, and what else there is to say of it."""

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
        len(head_bytes(rows, source.aliases)),
        source_bytes(source),
        int(max((estimate.peak_bytes for estimate in estimates.values()), default=0)),
        int(dense + LOAD_FACTOR * largest),
        recipe,
    )


def _by_rules(source: Source, rules: Rules) -> dict[str, _Estimate]:
    choices = rules.plan(source)
    found = of_a_few(source, choices, lambda name: _encoded_in_part(name, source, choices[name]))
    return {name: replace(one, row=replace(one.row, name=name)) for name, one in found.items()}


def _encoded_in_part(name: str, source: Source, choice: Choice) -> _Estimate:
    entry = source.entries[name]
    weight = entry.load()
    started = time.perf_counter()
    with while_compressing(name):
        sample = sample_of(weight, choice.method, source.transposed_groups.get(name, 0))
        whole = sample.growth == 1.0
        groups = source.transposed_groups.get(name, 0) if whole else 0
        encoded = sample.method.encode(sample.values, groups).noted(choice.note)
    row = stored(name, encoded)[0]
    seconds = sample.whole_seconds(time.perf_counter() - started)
    parts = {
        part: replace(kept, stored_bytes=round(kept.stored_bytes * sample.part_growth(encoded, part)))
        for part, kept in row.parts.items()
    }
    factor = COMPRESS_FACTOR.get(choice.method.name, USUAL_FACTOR)
    grown = replace(row, parts=parts, filler_bytes=round(row.filler_bytes * sample.growth))
    return _Estimate(grown, words(encoded), seconds, factor * _dense_bytes(entry))


def _by_budget(source: Source, shared_out: Planned) -> dict[str, _Estimate]:
    found = {}
    for name, entry in source.entries.items():
        row = stored(name, shared_out.empty[name])[0]
        if name in shared_out.weights:
            share = shared_out.weights[name]
            part = next(iter(row.parts))
            codes = max(round(share.bytes) - row.stored_bytes + row.parts[part].stored_bytes, 0)
            row = replace(row, parts={part: replace(row.parts[part], stored_bytes=codes)})
            bits = f"{8 * share.bytes / entry.numel:.2f} bits a weight"
            text = bits if share.tile == 1 else f"{bits}, in a basis over tiles of {share.tile}"
            found[name] = _Estimate(row, text, share.seconds, _budget_peak(_dense_bytes(entry)))
        else:
            found[name] = _Estimate(row, words(shared_out.empty[name]), 0.0, 0.0)
    return found


def _dense_bytes(entry: Entry) -> int:
    return fp32_bytes(entry.dtype, entry.numel)


def _budget_peak(dense: int) -> float:
    return min(BUDGET_FACTOR * dense, BUDGET_BUFFER + BEYOND_BUFFER * dense)
