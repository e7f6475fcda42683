"""The grid of a comparison: methods times sizes, a file and a measured point each, resumed where it ended."""

from __future__ import annotations

import copy
import json
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from factorpack.budget.goals import budget_bytes, original_bytes
from factorpack.budget.norms import small_leftovers
from factorpack.budget.planner import Planner
from factorpack.comparison.ladders import Ladders
from factorpack.comparison.opponents import COMPARED, PLANNED, choose_compared
from factorpack.comparison.permute import permute_model
from factorpack.compression import compress
from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.format.atomic import atomic_write
from factorpack.format.locks import locked
from factorpack.format.packed_file import file_bytes
from factorpack.format.streams import raw_bytes
from factorpack.methods import Method
from factorpack.methods.codeword_tiles import tile_of
from factorpack.packed import Packed, load, save
from factorpack.planning.rules import not_a_weight
from factorpack.progress import Progress
from factorpack.source import Checkpoint, open_source
from factorpack.tune.schedule import Schedule

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""A model -> what was measured of it, as {"top1": 0.69}."""


@dataclass(frozen=True, slots=True)
class Point:
    """One method at one size. `file` is None where the method makes no file so small."""

    method: str
    asked_ratio: float
    settings: str
    file: str | None = None
    file_bytes: int = 0
    file_ratio: float = 0.0
    weight_error: float = 0.0
    """Squared error of all coded weights over their energy."""
    compress_s: float = 0.0
    measured: Mapping[str, float] = field(default_factory=dict)
    trained: Mapping[str, Any] = field(default_factory=dict)
    """The schedule it was trained by, empty where it was not."""


@dataclass(frozen=True)
class Grid:
    """What is compared and how it is measured. Files and points lie in `folder` as they come."""

    model: nn.Module
    ratios: Sequence[float]
    folder: Path
    methods: Sequence[str] = ("all",)
    calibration: Sequence[Any] = ()
    """Batches of inputs, for the methods that want them; the first serves to follow channels."""
    evaluate: Evaluate | None = None
    train: Iterable[Any] | None = None
    """Batches to train every method on, by the same `schedule`, with the model itself as teacher."""
    schedule: Schedule = field(default_factory=Schedule)
    planner: Planner = field(default_factory=Planner)
    progress: bool = True

    def run(self) -> list[Point]:
        """Every point, those of an earlier run from their files."""
        names = self.check()
        points = []
        with Progress("comparing", len(names) * len(self.ratios), self.progress, "points") as bar:
            for name in names:
                for ratio in sorted(self.ratios):
                    bar.show(f"{name} at {ratio:g}x")
                    points.append(self._kept(name, ratio) or self._made(name, ratio))
                    bar.advance(name, 1)
        return points

    def check(self) -> list[str]:
        """The methods by name; what is no method or no ratio is refused before any work is done."""
        for ratio in self.ratios:
            budget_bytes(self._source, ratio)
        return choose_compared(self.methods)

    @cached_property
    def _source(self) -> Any:
        return open_source(self.model)

    @cached_property
    def _permuted(self) -> nn.Module:
        """The same function with channels in another order; the model itself where there are no inputs."""
        if not self.calibration:
            return self.model
        return permute_model(self.model, self.calibration[0], tile_of=_large_tile)[0]

    @cached_property
    def _ladders(self) -> dict[str, Ladders]:
        return {
            name: Ladders(method.ladders(), partial(self._sized, self._start_of(name)))
            for name, method in COMPARED.items()
            if name in choose_compared(self.methods)
        }

    @cached_property
    def _fingerprint(self) -> str:
        """What points depend on beside their method and size."""
        how = (len(self.calibration), self.train is not None and asdict(self.schedule), asdict(self.planner))
        mark = zlib.crc32(repr(how).encode())
        for name, entry in self._source.entries.items():
            mark = zlib.crc32(name.encode() + raw_bytes(entry.load()), mark)
        return f"{mark:08x}"

    def _start_of(self, name: str) -> nn.Module:
        return self._permuted if name != PLANNED and COMPARED[name].permutes else self.model

    def _sized(self, model: nn.Module, method: Method) -> tuple[int, float]:
        packed = self._small(compress(model, method.for_sizing(), progress=False))
        return file_bytes(dict(packed), packed.aliases), weight_error(model, packed)

    def _small(self, packed: Packed) -> Packed:
        """With norms folded and vectors in FP16, as the planner has them: no opponent pays for FP32 leftovers."""
        return Packed(small_leftovers(packed, self.model), packed.aliases)

    def _made(self, name: str, ratio: float) -> Point:
        start = self._start_of(name)
        started = time.perf_counter()
        if name == PLANNED:
            settings = f"ratio {ratio:g}"
            planner = replace(self.planner, fold_norms=self.train is None)
            batches = self.calibration or None
            packed = compress(start, ratio=ratio, calibration=batches, planner=planner, progress=False)
        else:
            method = self._ladders[name].within(budget_bytes(self._source, ratio))
            if method is None:
                least = original_bytes(self._source) / self._ladders[name].smallest()
                return self._keep(Point(name, ratio, f"{least:.1f}x is the smallest it makes"))
            started = time.perf_counter()
            batches = self.calibration if method.samples and self.calibration else None
            method = method if batches else method.without_data()
            settings = _words(method)
            packed = compress(start, method, calibration=batches, progress=False)
        seconds = time.perf_counter() - started
        error = weight_error(start, packed)
        trained = self._trained(packed, start, ratio if name == PLANNED else 0.0)
        path = self.folder / _packed_name(name, ratio)
        self.folder.mkdir(parents=True, exist_ok=True)
        save(packed if name == PLANNED and not trained else self._small(packed), path)
        loaded = load(path)
        measured: Mapping[str, float] = {}
        if self.evaluate is not None:
            measured = self.evaluate(loaded.load_into(copy.deepcopy(self.model)))
        report = loaded.size()
        return self._keep(
            Point(
                name,
                ratio,
                settings,
                path.name,
                report.file_bytes or 0,
                report.file_ratio or 0.0,
                error,
                seconds,
                measured,
                trained,
            )
        )

    def _trained(self, packed: Packed, start: nn.Module, target: float) -> dict[str, Any]:
        if self.train is None:
            return {}
        from factorpack.tune.training import finetune  # accelerate is an extra

        schedule = replace(self.schedule, target_ratio=target)
        finetune(
            packed,
            copy.deepcopy(start),
            self.train,
            teacher=self.model,
            schedule=schedule,
            finish=self._small,
            progress=False,
        )
        return asdict(schedule)

    def _keep(self, point: Point) -> Point:
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"fingerprint": self._fingerprint, **asdict(point)}
        with atomic_write(self._path(point.method, point.asked_ratio)) as file:
            file.write(json.dumps(document, indent=1).encode())
        return point

    def _kept(self, name: str, ratio: float) -> Point | None:
        """A point of an earlier run of this very comparison."""
        path = self._path(name, ratio)
        if not path.exists():
            return None
        try:
            document = json.loads(path.read_text())
            mark = document.pop("fingerprint")
            point = Point(**document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"{path} holds no point of a comparison: {error!r}; remove it or name another folder"
            ) from error
        if mark != self._fingerprint:
            raise PlanError(
                f"{path} is of another model, other data or another schedule: remove it or name another folder"
            )
        return point

    def _path(self, name: str, ratio: float) -> Path:
        return self.folder / _point_name(name, ratio)


def files_of(methods: Sequence[str], ratios: Sequence[float]) -> list[str]:
    """The names of all files that points of these methods and ratios are kept in."""
    pairs = [(name, ratio) for name in methods for ratio in ratios]
    return [make(name, ratio) for name, ratio in pairs for make in (_packed_name, _point_name)]


def _packed_name(method: str, ratio: float) -> str:
    return f"{method}-{ratio:g}.packed.safetensors"


def _point_name(method: str, ratio: float) -> str:
    return f"{method}-{ratio:g}.json"


def compare(model: nn.Module, ratios: Sequence[float], folder: str | Path, **settings: Any) -> list[Point]:
    """Compresses a model with every method at every ratio, into files in `folder`, and measures them.

    Each method gets the settings whose file is the largest within the size, and the closest to the weights
    where several kinds of settings have one; the point has the real ratio.
    Batch norms are folded and vectors halved for all, as the planner does. `settings` are `Grid`'s: methods,
    calibration, evaluate, train, schedule, planner. Interrupted, it goes on from the points that are there.

    >>> points = fp.compare(model, [10, 20, 30], "comparison", calibration=batches)  # doctest: +SKIP
    """
    grid = Grid(model, ratios, Path(folder), **settings)
    grid.check()
    grid.folder.mkdir(parents=True, exist_ok=True)
    with locked(grid.folder / "compare.json"):
        return grid.run()


def weight_error(source: Checkpoint, packed: Packed) -> float:
    """Of tensors that are weights: what rounding, or keeping less than all, has cost."""
    lost = energy = 0.0
    for name, entry in open_source(source).entries.items():
        if not not_a_weight(entry):
            original: Tensor = entry.load().double().cpu()
            lost += float((decode(packed[name]).double().cpu() - original).square().sum())
            energy += float(original.square().sum())
    return lost / energy if energy else 0.0


def _words(method: Method) -> str:
    """A method with what differs from its defaults, as SVD(share=0.454)."""
    given = [
        f"{each.name}={value:.4g}" if isinstance(value, float) else f"{each.name}={value!r}"
        for each in fields(method)  # type: ignore[arg-type]
        if (value := getattr(method, each.name)) != each.default and each.name != "solver"
    ]
    return f"{type(method).__name__}({', '.join(given)})"


def _large_tile(_name: str, shape: tuple[int, ...]) -> int:
    """Channels are ordered for tiles over several of them: small ones lie inside a kernel."""
    return tile_of(shape, "large")
