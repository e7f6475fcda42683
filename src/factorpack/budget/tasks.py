"""A budget met in parts, from the weights alone: a task a weight for its curve, then one for its codes.

The driver holds curves, sizes and names. With calibration data each layer would wait for the layers before
it: that is `Budgeter`'s, in one process. Here no weight waits for another, so what one of them misses is
not spent by the next, and the bytes are not quite those of `Budgeter`, within the same budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from factorpack.budget.budgeter import (
    AIM,
    CLOSING_TRIES,
    LEAST,
    closer_of,
    is_fixed,
    overhead_of,
    zero_of,
)
from factorpack.budget.candidates import NUMBERS_AT_ONCE, OCTAVES, Rounding, best_pose, curve, meet, pose
from factorpack.budget.curves import Curve, allocate, load_curves, save_curves
from factorpack.budget.norms import small_leftovers
from factorpack.budget.planner import Work
from factorpack.budget.step_search import Best, Closing
from factorpack.engine import Engine, Task, run_tasks
from factorpack.errors import PlanError, while_compressing
from factorpack.format.atomic import rename
from factorpack.format.container import Reader, stored
from factorpack.format.packed_file import assemble, bytes_of, write_packed
from factorpack.format.schema import TensorRow
from factorpack.methods import Scalar
from factorpack.methods.protocol import check_type
from factorpack.per_tensor import (
    BASE_BYTES,
    encode,
    is_whole,
    marks_of,
    need_bytes,
    part_name,
    path_of,
    unchanged,
    work_folder,
)
from factorpack.planning.rules import Choice, Rules

PLANNED_BYTES = 56
"""What a number takes while it is planned or coded, at one step."""


@dataclass(frozen=True, slots=True)
class Aim:
    """How a weight is to be coded: at about so many bytes, or at a step exactly."""

    tile: int
    rounding: Rounding
    step: float
    bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """All that a worker is told of a weight, but for what to do with it."""

    checkpoint: Path
    name: str
    mark: str


def compress_to_budget_in_parts(
    path: Path, source: object, work: Work, max_bytes: int, engine: Engine
) -> None:
    """Writes a file of at most `max_bytes`, and about 99 % of that, by tasks of an engine."""
    check_type("max_bytes", max_bytes, int)
    checkpoint, target = path_of(source), path.absolute()
    with work_folder(target) as folder:
        spread = _Spread(checkpoint, work, folder, engine)
        assemble(folder / "whole.part", spread.run(max_bytes), work.source.aliases)
        rename(folder / "whole.part", target)


class _Spread:
    def __init__(self, checkpoint: Path, work: Work, folder: Path, engine: Engine) -> None:
        self.source, self.rounding = work.source, work.planner.rounding
        self.checkpoint, self.folder, self.engine, self.progress = checkpoint, folder, engine, work.progress
        self.marks = marks_of(work.source)
        plan = Rules(Scalar(8), work.layers, work.exclude).plan(work.source)
        self.fixed = {name: choice for name, choice in plan.items() if is_fixed(choice)}
        self.coded = [name for name in plan if name not in self.fixed]
        if not self.coded:
            raise PlanError("there is no weight to compress: all tensors are vectors, integers or excluded")
        self.rows: dict[str, TensorRow] = {}
        self.files: dict[str, Path] = {}

    def run(self, max_bytes: int) -> dict[str, Path]:
        """The parts of the file, in the source's order."""
        self._make_fixed()
        empty = {name: zero_of(self.source.entries[name]) for name in self.coded}
        rows = {name: stored(name, encoded)[0] for name, encoded in empty.items()}
        overhead = overhead_of(self._size(self.rows | rows), max_bytes, empty.values())
        numel = sum(self.source.entries[name].numel for name in self.coded)
        curves = self._curves(8 * (max_bytes - overhead) / numel)
        least = 1.01 * sum(one.bytes[-1] for one in curves.values())  # every code zero
        aim, best = AIM * max_bytes - overhead, Best[Path]()
        for _ in range(3):
            size = self._pass(curves, max(aim, least), max_bytes, best)
            if best.size >= LEAST * max_bytes:
                break
            # No single weight could make up for what was missed: aim lower, or higher, with all of them.
            aim *= max(AIM * max_bytes - overhead, 1.0) / max(size - overhead, 1.0)
        if not best.size:
            self._empty(max_bytes, best)
        return {name: best.found[name] for name in self.source.entries}

    def _make_fixed(self) -> None:
        tasks = []
        for name, choice in self.fixed.items():
            entry = self.source.entries[name]
            self.files[name] = self.folder / part_name("fixed", self.marks[name], name, choice)
            arguments = (self._weight(name), choice, self.files[name])
            tasks.append(Task(name, make_fixed, arguments, need_bytes(entry, choice), entry.numel))
        self._parts(tasks, "keeping")

    def _curves(self, bits: float) -> dict[str, Curve]:
        files = {
            name: self.folder / part_name("curve", self.marks[name], name, bits, self.rounding)
            for name in self.coded
        }
        tasks = [
            self._task(name, make_curve, (self._weight(name), bits, self.rounding, files[name]))
            for name in self.coded
            if _curve_of(files[name], name) is None
        ]
        for _ in run_tasks(self.engine, tasks, "planning", self.progress):
            pass
        found = {name: _curve_of(file, name) for name, file in files.items()}
        return {name: one for name, one in found.items() if one is not None}

    def _pass(self, curves: Mapping[str, Curve], aim: float, max_bytes: int, best: Best[Path]) -> int:
        """Every weight at the bytes planned for it; then one of them is changed until all together fit."""
        steps = allocate(curves, aim)
        planned = {name: curves[name].bytes_at(steps[name]) for name in self.coded}
        closer = closer_of(planned, self.coded)
        aims = {
            name: Aim(
                curves[name].tile,
                replace(self.rounding, trellis=curves[name].trellis),
                steps[name],
                None if name == closer else planned[name],
            )
            for name in self.coded
        }
        self._code(aims)
        closing = Closing(self.source.entries[closer].numel, steps[closer], self.rounding.price)
        for _ in range(CLOSING_TRIES):
            size = self._size(self.rows)
            best.offer(max_bytes, size, self.files)
            if LEAST * max_bytes <= size <= max_bytes:
                break
            own = sum(part.stored_bytes for part in self.rows[closer].parts.values())
            closing.after(own, own + AIM * max_bytes - size)
            rounding = replace(aims[closer].rounding, price=closing.price)
            self._code({closer: replace(aims[closer], rounding=rounding, step=closing.step)})
        return size

    def _code(self, aims: Mapping[str, Aim]) -> None:
        tasks = []
        for name, aim in aims.items():
            self.files[name] = self.folder / part_name("codes", self.marks[name], name, aim)
            tasks.append(self._task(name, make_codes, (self._weight(name), aim, self.files[name])))
        self._parts(tasks, "compressing")

    def _parts(self, tasks: Sequence[Task], verb: str) -> None:
        """Makes the parts that are not there yet, and learns how all of them are stored."""
        names = [task.name for task in tasks]
        missing = [task for task in tasks if not is_whole(self.files[task.name], task.name)]
        for _ in run_tasks(self.engine, missing, verb, self.progress):
            pass
        for name in names:
            self.rows[name] = Reader(self.files[name]).rows[name]

    def _empty(self, max_bytes: int, best: Best[Path]) -> None:
        """The last resort of a budget barely above headers: the largest weights become zero."""
        for name in sorted(self.coded, key=lambda one: -self.rows[one].stored_bytes):
            zero = zero_of(self.source.entries[name]).noted("zero: the budget leaves no room for it")
            self.files[name] = self.folder / part_name("zero", name, zero.shape, zero.dtype)
            write_packed(self.files[name], [(name, zero)], {})
            self.rows[name] = Reader(self.files[name]).rows[name]
            best.offer(max_bytes, self._size(self.rows), self.files)
            if best.size:
                return

    def _size(self, rows: Mapping[str, TensorRow]) -> int:
        return bytes_of([rows[name] for name in self.source.entries], self.source.aliases)

    def _weight(self, name: str) -> Weight:
        return Weight(self.checkpoint, name, self.marks[name])

    def _task(self, name: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> Task:
        numel = self.source.entries[name].numel
        # Several steps are tried at once where the weight is small.
        at_once = min(max(numel, NUMBERS_AT_ONCE), (len(OCTAVES) + 1) * numel)
        return Task(name, function, arguments, BASE_BYTES + PLANNED_BYTES * at_once, numel)


def make_fixed(weight: Weight, choice: Choice, part: Path) -> None:
    """A worker's task: a tensor the budget does not touch, as small as it goes without loss to speak of."""
    with unchanged(weight.checkpoint, weight.name, weight.mark) as source:
        kept = small_leftovers({weight.name: encode(weight.name, source, choice)}, None)
    write_packed(part, kept.items(), {})


def make_curve(weight: Weight, bits: float, rounding: Rounding, part: Path) -> None:
    """A worker's task: what a weight takes and loses at rising steps."""
    with unchanged(weight.checkpoint, weight.name, weight.mark) as source, while_compressing(weight.name):
        posed = best_pose(source.entries[weight.name].load(), 0, None, None, bits, rounding)
        found, _ = curve(posed, bits)
    save_curves(part, {weight.name: found}, weight.name)


def make_codes(weight: Weight, aim: Aim, part: Path) -> None:
    """A worker's task: a weight at a step, or at a number of bytes."""
    with unchanged(weight.checkpoint, weight.name, weight.mark) as source, while_compressing(weight.name):
        posed = pose(source.entries[weight.name].load(), 0, None, None, aim.tile, aim.rounding)
        encoded = posed.at([aim.step])[0][0] if aim.bytes is None else meet(posed, aim.step, aim.bytes)[1]
    write_packed(part, [(weight.name, encoded)], {})


def _curve_of(part: Path, name: str) -> Curve | None:
    try:
        found = load_curves(part, name)
    except PlanError:  # harmed
        return None
    return None if found is None else found.get(name)
