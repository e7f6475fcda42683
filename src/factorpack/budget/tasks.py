"""A budget met from the weights alone by tasks of an engine: one per weight for its curve, then for its codes.

The driver holds curves, sizes and names. With calibration data each layer waits for the layers before it,
which is `sequential`; what does not wait is spread by `workers`. Here no weight waits for another, so what one
of them misses is not spent by the next: the bytes are not quite those of `sequential`, within the same budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from factorpack.budget.candidates import plan_together, planning_bytes
from factorpack.budget.coding import encode_with_steps, meet_bytes
from factorpack.budget.curves import Curve, load_curves, save_curves
from factorpack.budget.following_norms import MeanOutput
from factorpack.budget.goals import check_max_bytes
from factorpack.budget.mean_inputs import explain_means
from factorpack.budget.meet import meet_size
from factorpack.budget.norm_bits import FEWEST_BITS, choose_norm_bits, count_norm_values
from factorpack.budget.norms import small_leftovers
from factorpack.budget.planner import BudgetRequest, Planner
from factorpack.budget.tensors import choose_fixed, overhead_bytes, zero_of
from factorpack.decoding import decode
from factorpack.engine import Engine, Task, run_tasks
from factorpack.errors import FormatError, PlanError, while_compressing
from factorpack.format.checked_file import say_damaged
from factorpack.format.container import Reader, stored
from factorpack.format.packed_file import bytes_of
from factorpack.format.schema import TensorRow
from factorpack.methods import SecondOrder
from factorpack.per_tensor import (
    BASE_BYTES,
    StoredTensor,
    checkpoint_path,
    checksums_of,
    is_whole,
    join_files,
    peak_bytes,
    read_stored,
    work_file_name,
    work_folder,
    write_part,
)
from factorpack.planning.rules import Choice
from factorpack.weight import Weight


def compress_to_bytes_over(
    engine: Engine, path: Path, source: object, request: BudgetRequest, max_bytes: int
) -> None:
    """Writes a file of at most `max_bytes`, and about 99 % of that, by tasks of an engine."""
    check_max_bytes(max_bytes)
    checkpoint, target = checkpoint_path(source), path.absolute()
    with work_folder(target) as folder:
        coder = TaskCoder(checkpoint, request, folder, engine, max_bytes)
        overhead = coder.overhead_bytes(max_bytes)
        curves = coder.find_curves(8 * (max_bytes - overhead) / coder.total_numel())
        files = meet_size(coder, curves, request.planner, max_bytes, overhead)
        join_files(folder, files, request.source, target)


class TaskCoder:
    """A `Coder` whose weights are coded by workers, each into a file of its own."""

    def __init__(
        self, checkpoint: Path, request: BudgetRequest, folder: Path, engine: Engine, max_bytes: int
    ) -> None:
        self._source, self._planner, self._progress = request.source, request.planner, request.progress
        self._checkpoint, self._folder, self._engine = checkpoint, folder, engine
        self._checksums = checksums_of(request.source)
        fixed, self.order = choose_fixed(request)
        explained = explain_means(request.source, self.order) if request.planner.correct_means else {}
        self._means = {
            weight: (kept, fixed[kept], output)
            for weight, (kept, output) in explained.items()
            if kept in fixed and not fixed[kept].by_caller
        }
        self._rows: dict[str, TensorRow] = {}
        self._files: dict[str, Path] = {}
        self._steps: dict[str, float] = {}
        self._empty = {name: zero_of(request.source.entries[name]) for name in self.order}
        self._norm_bits = self._choose_norm_bits(fixed, max_bytes)
        self._encode_fixed(fixed)
        least = FEWEST_BITS if request.planner.norm_bits is None else self._norm_bits
        while self._norm_bits > least and self._smallest_bytes() > max_bytes:
            self._norm_bits -= 1
            self._encode_fixed(fixed)

    def total_numel(self) -> int:
        return sum(map(self.numel, self.order))

    def overhead_bytes(self, max_bytes: int) -> int:
        """Bytes of everything but codes; an error where a file without a single code would be too large."""
        return overhead_bytes(self._smallest_bytes(), max_bytes, self._empty.values())

    def _smallest_bytes(self) -> int:
        """Bytes of the file in which every weight is zero."""
        return self._size(self._rows | {name: stored(name, zero)[0] for name, zero in self._empty.items()})

    def find_curves(self, bits: float) -> dict[str, Curve]:
        files = {
            name: self._folder / work_file_name("curve", self._checksums[name], name, bits, self._planner)
            for name in self.order
        }
        tasks = [
            self._task(name, measure_curve, (bits, self._planner, files[name]))
            for name in self.order
            if _read_curve(files[name], name) is None
        ]
        for _ in run_tasks(self._engine, tasks, "planning", self._progress):
            pass
        found = {name: _read_curve(file, name) for name, file in files.items()}
        return {name: curve for name, curve in found.items() if curve is not None}

    def encode(
        self, methods: Mapping[str, SecondOrder], planned: Mapping[str, float], aim: float, closer: str
    ) -> None:
        """Every weight at the bytes planned for it, but the one that closes the gap at its very step."""
        del aim
        self._code(
            {name: (method, None if name == closer else planned[name]) for name, method in methods.items()}
        )

    def numel(self, name: str) -> int:
        return self._source.entries[name].numel

    def step_of(self, name: str) -> float:
        return self._steps[name]

    def bytes_of(self, name: str) -> int:
        return sum(part.stored_bytes for part in self._rows[name].parts.values())

    def recode(self, name: str, method: SecondOrder) -> None:
        self._code({name: (method, None)})

    def zero(self, name: str) -> None:
        zero = zero_of(self._source.entries[name]).noted("zero: the budget leaves no room for it")
        self._files[name] = self._folder / work_file_name("zero", name, zero.shape, zero.dtype)
        behind = self._mean_behind(name, ("zero", self._checksums[name], name))
        if behind is not None:
            _write_mean(behind, decode(zero))
        write_part(self._files[name], name, zero)
        self._read_rows(name)

    def measure(self) -> tuple[int, dict[str, Path]]:
        return self._size(self._rows), {name: self._files[name] for name in self._source.entries}

    def _choose_norm_bits(self, fixed: Mapping[str, Choice], max_bytes: int) -> int:
        if self._planner.norm_bits is not None:
            return self._planner.norm_bits
        kept = [
            (name, self._source.entries[name].shape) for name, each in fixed.items() if not each.by_caller
        ]
        values = count_norm_values(kept, are_folded=False)
        return choose_norm_bits(values, self.total_numel(), max_bytes, is_calibrated=False)

    def _encode_fixed(self, fixed: Mapping[str, Choice]) -> None:
        tasks = []
        for name, choice in fixed.items():
            entry = self._source.entries[name]
            self._files[name] = self._folder / work_file_name(
                "fixed", self._checksums[name], name, choice, self._norm_bits
            )
            arguments = (self._stored(name), choice, self._norm_bits, self._files[name])
            tasks.append(Task(name, encode_fixed, arguments, peak_bytes(entry, choice), entry.numel))
        self._run(tasks, "keeping")

    def _code(self, wanted: Mapping[str, tuple[SecondOrder, float | None]]) -> None:
        """Codes weights by their methods: at their steps, or near them at a number of bytes."""
        tasks = []
        for name, (method, aim) in wanted.items():
            assert method.step is not None
            self._steps[name] = method.step
            key = ("codes", self._checksums[name], name, method, aim)
            self._files[name] = self._folder / work_file_name(*key)
            mean = self._mean_behind(name, key)
            tasks.append(self._task(name, encode_weight, (method, aim, self._files[name], mean)))
        self._run(tasks, "compressing")

    def _mean_behind(self, name: str, key: tuple[object, ...]) -> MeanBehind | None:
        """The running mean that is corrected for a weight's codes, and the file it goes into."""
        if name not in self._means:
            return None
        kept, choice, output = self._means[name]
        bits = self._norm_bits
        self._files[kept] = self._folder / work_file_name("mean", self._checksums[kept], kept, bits, *key)
        return MeanBehind(kept, choice, output, bits, self._files[kept])

    def _run(self, tasks: Sequence[Task], verb: str) -> None:
        """Makes the files that are not there yet, and reads how all of them are stored."""
        missing = [
            task
            for task in tasks
            if not all(is_whole(self._files[name], name) for name in self._made_with(task.name))
        ]
        for _ in run_tasks(self._engine, missing, verb, self._progress):
            pass
        for task in tasks:
            self._read_rows(task.name)

    def _made_with(self, name: str) -> list[str]:
        """A tensor, and the running mean that is corrected with it."""
        return [name, self._means[name][0]] if name in self._means else [name]

    def _read_rows(self, name: str) -> None:
        for each in self._made_with(name):
            self._rows[each] = Reader(self._files[each]).rows[each]

    def _size(self, rows: Mapping[str, TensorRow]) -> int:
        return bytes_of([rows[name] for name in self._source.entries], self._source.aliases)

    def _stored(self, name: str) -> StoredTensor:
        return StoredTensor(self._checkpoint, name, self._checksums[name], self._source.key)

    def _task(self, name: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> Task:
        numel = self.numel(name)
        memory = BASE_BYTES + planning_bytes(numel)
        return Task(name, function, (self._stored(name), *arguments), memory, numel)


def encode_fixed(tensor: StoredTensor, choice: Choice, norm_bits: int, file: Path) -> None:
    """A worker's task: a tensor the budget does not touch, as small as it goes without noticeable loss."""
    with while_compressing(tensor.name):
        kept = small_leftovers({tensor.name: choice.encode(read_stored(tensor))}, None, norm_bits=norm_bits)
    write_part(file, tensor.name, kept[tensor.name])


def measure_curve(tensor: StoredTensor, bits: float, planner: Planner, file: Path) -> None:
    """A worker's task: bytes and loss of a weight at rising steps."""
    curves = plan_together({tensor.name: read_stored(tensor)}, planner, bits)
    save_curves(file, curves, file.stem)


@dataclass(frozen=True, slots=True)
class MeanBehind:
    """What keeps the mean output of a weight: the running mean of the norm behind it, or its own bias."""

    name: str
    choice: Choice
    output: MeanOutput
    norm_bits: int
    file: Path


def encode_weight(
    tensor: StoredTensor, method: SecondOrder, aim: float | None, file: Path, behind: MeanBehind | None
) -> None:
    """A worker's task: a weight by its method, or near its step at a number of bytes, and the mean behind it."""
    assert method.step is not None
    with while_compressing(tensor.name):
        weight = read_stored(tensor)
        encoded = (
            encode_with_steps([weight], [method], [method.step])[0]
            if aim is None
            else meet_bytes(weight, method, aim).encoded
        )
    if behind is not None:
        _write_mean(behind, decode(encoded))
    write_part(file, tensor.name, encoded)


def _write_mean(behind: MeanBehind, weight: Tensor) -> None:
    """The running mean, or bias, that keeps the mean output of a weight as it was."""
    mean = behind.output.with_weight(weight)
    kept = small_leftovers(
        {behind.name: behind.choice.encode(Weight(mean))}, None, norm_bits=behind.norm_bits
    )
    write_part(behind.file, behind.name, kept[behind.name])


def _read_curve(file: Path, name: str) -> Curve | None:
    """A finished curve; None, with a warning, where its file is damaged."""
    try:
        found = load_curves(file, file.stem)
        if found is not None and list(found) != [name]:
            raise FormatError(f"it holds curves of {sorted(found)[:2]}")
    except (FormatError, PlanError) as error:
        say_damaged(file, f"the curve of {name!r}", error)
        return None
    return None if found is None else found[name]
