"""The grid of a comparison: methods times sizes, each with a file and a measured point; it can be resumed."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from factorpack.budget.goals import budget_bytes, original_bytes
from factorpack.budget.journal import content_of_batches
from factorpack.budget.norms import small_leftovers
from factorpack.budget.planner import Planner
from factorpack.comparison.baselines import BASELINES, PEERS, PLANNED, select_methods
from factorpack.comparison.ladders import Ladders
from factorpack.comparison.nncodec import NNCodec
from factorpack.comparison.permute import permute_model
from factorpack.comparison.point import Point, file_name, point_name
from factorpack.compression import compress
from factorpack.decoding import decode
from factorpack.errors import FormatError, PlanError, SourceError
from factorpack.format.atomic import atomic_write
from factorpack.format.checked_file import read_checked_json, say_damaged, write_checked_json
from factorpack.format.locks import locked
from factorpack.format.packed_file import file_bytes
from factorpack.methods import Method
from factorpack.methods.codeword_tiles import tile_of
from factorpack.packed import Packed, load, save
from factorpack.planning.rules import not_a_weight
from factorpack.progress import Progress, Showing
from factorpack.source import Checkpoint, checksum_of, open_source
from factorpack.tune.schedule import Schedule
from factorpack.version import __version__

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""A model -> its measured scores, such as {"top1": 0.69}."""


LEFTOVER_BITS = 8
"""Bits of mantissa of norms and biases beside a baseline's codes: what rounding them loses is nothing to its loss."""
ON_ALL = Schedule(shrink_by="training", held_out_share=0.0)
"""Every method is trained on all inputs, and ends with its last state at its size."""


@dataclass(frozen=True)
class Grid:
    """What is compared and how it is measured. Files and points are written to `folder` one by one."""

    model: nn.Module
    ratios: Sequence[float]
    folder: Path
    methods: Sequence[str] = ("all",)
    calibration: Sequence[Any] = ()
    """Batches of inputs, for methods that use them; the first one also serves to trace channels."""
    evaluate: Evaluate | None = None
    train: Iterable[Any] | None = None
    """Batches to finetune every method on, with the same `schedule` and the model itself as teacher."""
    schedule: Schedule = ON_ALL
    planner: Planner = field(default_factory=Planner)
    progress: Showing = True
    data: str = ""
    """Stands for the data of `evaluate` and `train`, so that points measured on other data are told apart."""

    def run(self) -> list[Point]:
        """Returns every point; those of an earlier run are read from their files."""
        names = self.check()
        points = []
        with Progress("comparing", len(names) * len(self.ratios), self.progress) as bar:
            for name in names:
                for ratio in sorted(self.ratios):
                    bar.show(f"{name} at {ratio:g}x")
                    points.append(self._read_point(name, ratio) or self._compute_point(name, ratio))
                    bar.advance(name, 1)
        return points

    def check(self) -> list[str]:
        """Returns the method names; unknown methods and invalid ratios raise before any work is done."""
        for ratio in self.ratios:
            budget_bytes(self._source, ratio)
        names = select_methods(self.methods)
        for name in PEERS.keys() & set(names):
            PEERS[name].version()
            if self.train is not None:
                raise PlanError(f"{name} cannot be trained: compare it without training")
        return names

    @cached_property
    def _source(self) -> Any:
        return open_source(self.model)

    @cached_property
    def _permuted(self) -> nn.Module:
        """The same function with channels in another order; the model itself without calibration inputs."""
        if not self.calibration:
            return self.model
        return permute_model(self.model, self.calibration[0], tile_of=_large_tile)[0]

    @cached_property
    def _ladders(self) -> dict[str, Ladders[Method]]:
        return {
            name: Ladders(method.ladders(), partial(self._measure_size, self._starting_model(name)))
            for name, method in BASELINES.items()
            if name in select_methods(self.methods)
        }

    @cached_property
    def _peers(self) -> dict[str, NNCodec]:
        return {name: PEERS[name](self.model) for name in PEERS if name in self.methods}

    @cached_property
    def _fingerprint(self) -> str:
        """A checksum of everything else that points depend on."""
        setup = (
            __version__,
            self.data,
            self.train is not None and asdict(self.schedule),
            asdict(self.planner),
        )
        checksum = hashlib.sha256(repr(setup).encode())
        for name, entry in self._source.entries.items():
            checksum.update(f"{name} {checksum_of(entry.load())}".encode())
        for each in content_of_batches(self.calibration):
            checksum.update(each)
        return checksum.hexdigest()

    def _starting_model(self, name: str) -> nn.Module:
        return self._permuted if name != PLANNED and BASELINES[name].permutes else self.model

    def _measure_size(self, model: nn.Module, method: Method) -> tuple[int, float]:
        packed = self._shrink_leftovers(compress(model, method.for_sizing(), progress=False))
        return file_bytes(dict(packed), packed.aliases), weight_error(model, packed)

    def _shrink_leftovers(self, packed: Packed) -> Packed:
        """Folds norms and rounds vectors, as the planner does: no baseline pays for FP32 leftovers."""
        return Packed(small_leftovers(packed, self.model, norm_bits=LEFTOVER_BITS), packed.aliases)

    def _compute_point(self, name: str, ratio: float) -> Point:
        if name in PEERS:
            return self._compute_peer_point(name, ratio)
        start = self._starting_model(name)
        started = time.perf_counter()
        if name == PLANNED:
            settings = f"ratio {ratio:g}"
            planner = replace(self.planner, fold_norms=self.train is None)
            batches = self.calibration or None
            packed = compress(start, ratio=ratio, calibration=batches, planner=planner, progress=False)
        else:
            method = self._ladders[name].best_within(budget_bytes(self._source, ratio))
            if method is None:
                return self._write_smallest(name, ratio, self._ladders[name].smallest())
            started = time.perf_counter()
            batches = self.calibration if method.samples and self.calibration else None
            method = method if batches else method.without_data()
            settings = _describe(method)
            packed = compress(start, method, calibration=batches, progress=False)
        seconds = time.perf_counter() - started
        error = weight_error(start, packed)
        trained = self._finetune(packed, start, ratio if name == PLANNED else 0.0)
        path = self.folder / file_name(name, ratio)
        self.folder.mkdir(parents=True, exist_ok=True)
        save(packed if name == PLANNED and not trained else self._shrink_leftovers(packed), path)
        loaded = load(path)
        measured = self._measure(loaded.load_into(copy.deepcopy(self.model)))
        report = loaded.size()
        return self._write_point(
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

    def _compute_peer_point(self, name: str, ratio: float) -> Point:
        """Its own file, decoded by its own package."""
        peer = self._peers[name]
        qp = peer.sizes.best_within(budget_bytes(self._source, ratio))
        if qp is None:
            return self._write_smallest(name, ratio, peer.sizes.smallest(), peer.version())
        started = time.perf_counter()
        stream = peer.encode(qp)
        seconds = time.perf_counter() - started
        path = self.folder / file_name(name, ratio)
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(stream)
        state = peer.decode(path.read_bytes())
        net = copy.deepcopy(self.model)
        net.load_state_dict(state)
        return self._write_point(
            Point(
                name,
                ratio,
                f"qp {qp:g}",
                path.name,
                len(stream),
                original_bytes(self._source) / len(stream),
                _relative_error(self.model, state.__getitem__),
                seconds,
                self._measure(net),
                version=peer.version(),
            )
        )

    def _measure(self, net: nn.Module) -> Mapping[str, float]:
        return {} if self.evaluate is None else self.evaluate(net)

    def _write_smallest(self, name: str, ratio: float, least_bytes: int, version: str = "") -> Point:
        least = original_bytes(self._source) / least_bytes
        point = Point(name, ratio, f"{least:.1f}x is the smallest it makes", version=version)
        return self._write_point(point)

    def _finetune(self, packed: Packed, start: nn.Module, target: float) -> dict[str, Any]:
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
            finish=self._shrink_leftovers,
            progress=False,
        )
        return asdict(schedule)

    def _write_point(self, point: Point) -> Point:
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"fingerprint": self._fingerprint, "packed": self._packed_checksum(point)}
        write_checked_json(self._point_path(point.method, point.asked_ratio), {**document, **asdict(point)})
        return point

    def _packed_checksum(self, point: Point) -> str:
        """Of a point's packed file; empty where it has none."""
        if point.file is None:
            return ""
        with (self.folder / point.file).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _read_point(self, name: str, ratio: float) -> Point | None:
        """A point from an earlier run of the same comparison; None, with a warning, where it is damaged."""
        path = self._point_path(name, ratio)
        if not path.exists():
            return None
        try:
            document = read_checked_json(path)
            fingerprint, packed = document.pop("fingerprint"), document.pop("packed")
            point = Point(**document)
            if (point.method, point.asked_ratio) != (name, ratio):
                raise FormatError(f"it is the point of {point.method} at {point.asked_ratio:g}x")
            if fingerprint == self._fingerprint and packed != self._packed_checksum(point):
                raise FormatError(f"{point.file} has changed since it was measured")
        except (FormatError, FileNotFoundError) as error:
            say_damaged(path, f"{name} at {ratio:g}x", error)
            return None
        except (SourceError, KeyError, TypeError) as error:
            raise PlanError(
                f"{path} holds no point of a comparison: {error}; remove it or use another folder"
            ) from error
        if fingerprint != self._fingerprint:
            raise PlanError(
                f"{path} is from another model, other data or another schedule: remove it or use another folder"
            )
        return point

    def _point_path(self, name: str, ratio: float) -> Path:
        return self.folder / point_name(name, ratio)


def compare(model: nn.Module, ratios: Sequence[float], folder: str | Path, **settings: Any) -> list[Point]:
    """Compresses a model with every method at every ratio, into files in `folder`, and measures them.

    Each method gets the settings with the largest file that fits the size; where several ladders of settings
    have one, the one closest to the weights. The point records the real ratio. Batch norms are folded and
    vectors halved for all methods, as the planner does. `settings` are `Grid`'s: methods, calibration,
    evaluate, train, schedule, planner. An interrupted comparison resumes from the points it has.

    >>> points = fp.compare(model, [10, 20, 30], "comparison", calibration=batches)  # doctest: +SKIP
    """
    grid = Grid(model, ratios, Path(folder), **settings)
    grid.check()
    grid.folder.mkdir(parents=True, exist_ok=True)
    with locked(grid.folder / "compare.json"):
        return grid.run()


def weight_error(source: Checkpoint, packed: Packed) -> float:
    """Relative squared error of all weights."""
    return _relative_error(source, lambda name: decode(packed[name]))


def _relative_error(source: Checkpoint, decoded: Callable[[str], Tensor]) -> float:
    lost = energy = 0.0
    for name, entry in open_source(source).entries.items():
        if not not_a_weight(entry):
            original: Tensor = entry.load().double().cpu()
            lost += float((decoded(name).double().cpu() - original).square().sum())
            energy += float(original.square().sum())
    return lost / energy if energy else 0.0


def _describe(method: Method) -> str:
    """A method with its non-default settings, such as SVD(share=0.454)."""
    settings = [
        f"{each.name}={value:.4g}" if isinstance(value, float) else f"{each.name}={value!r}"
        for each in fields(method)  # type: ignore[arg-type]
        if (value := getattr(method, each.name)) != each.default and each.name != "solver"
    ]
    return f"{type(method).__name__}({', '.join(settings)})"


def _large_tile(_name: str, shape: tuple[int, ...]) -> int:
    """Tiles that span several channels; small ones lie inside a kernel and gain nothing from an order."""
    return tile_of(shape, "large")
