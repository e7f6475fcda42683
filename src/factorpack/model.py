"""Verbs on whole models: compress, save, load, and `Packed`, what they pass around."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.budget import budget_bytes, compress_to_budget, compress_to_loss
from factorpack.budget_parts import compress_to_budget_in_parts
from factorpack.calibrate import Calibration, calibrate, evaluating, forward
from factorpack.decode import decode
from factorpack.engine import Engine
from factorpack.errors import PlanError, SourceError
from factorpack.format.ahead import read_ahead
from factorpack.format.container import Reader, write_plain
from factorpack.format.whole import write_packed
from factorpack.methods import QSPCA, Method, samples_of
from factorpack.methods.protocol import wants_moments
from factorpack.parts import compress_in_parts, encode
from factorpack.plan.curves import Curve
from factorpack.plan.families import asked, recipe_file
from factorpack.plan.planner import Planner, Work
from factorpack.plan.rules import Choice
from factorpack.progress import Progress
from factorpack.record import DTYPES, Encoded, LayerMoments, LayerSample
from factorpack.runtime.apply import Applied, Mode, apply
from factorpack.size import SizeReport, size_report
from factorpack.solve.moments import has_moments
from factorpack.source import Source, check_output, open_source, weight_of

DEFAULT_METHOD = QSPCA(rank=256, latent_bits=5)

Checkpoint = nn.Module | Mapping[str, Tensor] | str | Path


class Packed(Mapping[str, Encoded]):
    """A compressed model: its tensors by name, in memory or still in their file.

    >>> packed = fp.load("model.packed.safetensors")  # doctest: +SKIP
    >>> model.load_state_dict(packed.state_dict())  # doctest: +SKIP
    """

    def __init__(
        self,
        tensors: Mapping[str, Encoded],
        aliases: Mapping[str, str] | None = None,
        reader: Reader | None = None,
    ) -> None:
        self._tensors = tensors
        self.aliases = dict(aliases or {})
        self._reader = reader
        self.curves: Mapping[str, Curve] = {}
        """Rate-distortion curves of the weights, where a budget was planned on them just now."""

    def __getitem__(self, name: str) -> Encoded:
        return self._tensors[self.aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self.aliases

    def __repr__(self) -> str:
        where = f" in {self._reader.path}" if self._reader is not None else ""
        return f"Packed({len(self)} tensors{where})"

    @property
    def path(self) -> Path | None:
        """The file this was loaded from or last saved to."""
        return self._reader.path if self._reader is not None else None

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every decoded tensor, aliases included, without decoding any."""
        if self._reader is not None:
            known = {name: (DTYPES[row.dtype], row.shape) for name, row in self._reader.rows.items()}
        else:
            known = {name: (encoded.dtype, encoded.shape) for name, encoded in self.items()}
        return known | {alias: known[target] for alias, target in self.aliases.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Plain weights under the names they came with; tied tensors are one tensor again."""
        state = {name: decode(encoded) for name, encoded in self._in_order()}
        return state | {alias: state[target] for alias, target in self.aliases.items()}

    def load_into(self, model: nn.Module) -> nn.Module:
        """Decodes straight into a model's tensors, one at a time. Names and shapes must fit exactly."""
        return self.apply(model).model

    def apply(
        self, model: nn.Module, mode: Mode = "dense", example: Any = None, slack: float = 0.0
    ) -> Applied:
        """Makes a model run on this file, in place. Names and shapes must fit exactly.

        "dense" decodes into the model's tensors and costs nothing afterwards. "packed" leaves codes in
        memory, and each layer rebuilds its weight in every forward. "factored" computes with the factors
        where a tile lies inside one output filter, and is "packed" elsewhere. "auto" times all three for
        each layer on `example`, a batch as for calibration, and takes the fastest; with `slack` it may give
        that share of the layers' dense time for less memory. What became of which layer, and why, is in
        the result's `layers`.

        >>> print(packed.apply(model, "auto", example=batch))  # doctest: +SKIP
        """
        self._check_fits(model)
        run = None if example is None else partial(_run_once, model, example)
        return apply(model, self._in_order(), self.aliases, mode, run, slack)

    def _in_order(self) -> Iterable[tuple[str, Encoded]]:
        """`items`, for a caller who takes them all: those still in their file are decoded ahead by threads."""
        if not isinstance(self._tensors, Reader):
            return self.items()
        return read_ahead(self._tensors, torch.get_num_threads())

    def _check_fits(self, model: nn.Module) -> None:
        targets = model.state_dict(keep_vars=True)
        names = {*self, *self.aliases}
        if names != set(targets):
            missing, extra = sorted(set(targets) - names), sorted(names - set(targets))
            raise SourceError(f"the model lacks {extra[:5]}, the file lacks {missing[:5]}")
        shapes = self.shapes()
        for name, target in targets.items():
            if shapes[name][1] != tuple(target.shape):
                raise SourceError(
                    f"tensor {name!r} is {shapes[name][1]} in the file, {tuple(target.shape)} in the model"
                )
            if target.is_meta:
                raise SourceError(f"the model's tensor {name!r} is on the meta device: use to_empty() first")

    def replace(self, tensors: Mapping[str, Encoded]) -> None:
        """Takes other tensors under the same names, in memory from now on."""
        if list(tensors) != list(self):
            raise SourceError("a packed model can only be given the tensors it has, in its own order")
        self._tensors, self._reader = dict(tensors), None

    def size(self) -> SizeReport:
        """Where the bits are: the paper's accounting, and the file's bytes once there is a file."""
        if self._reader is None:
            return size_report(self._tensors)
        part_bytes = {
            name: {part: stored.stored_bytes for part, stored in row.parts.items()}
            | {"header": row.filler_bytes}
            for name, row in self._reader.rows.items()
        }
        return size_report(self._tensors, part_bytes, self._reader.file_bytes)


def compress(
    source: Checkpoint,
    method: Method | None = None,
    *,
    ratio: float | None = None,
    max_bytes: int | None = None,
    max_loss: float | None = None,
    layers: Mapping[str, Method] | None = None,
    exclude: Sequence[str] = (),
    recipe: str | Path | None = None,
    calibration: Calibration | Iterable[Any] | None = None,
    sequential: bool = True,
    planner: Planner | None = None,
    curves: str | Path | None = None,
    progress: bool = True,
) -> Packed:
    """Compresses a model, a state dict or a checkpoint on disk: with `method`, or into a budget.

    A budget is one of `ratio` (FP32 bytes over the file's), `max_bytes`, and `max_loss` (nats of
    Kullback-Leibler divergence from the original's answers on an eighth of the calibration data, kept
    aside). Steps, bases, ranks, bits and zeros are then chosen for every weight, `planner` says how. With
    `calibration`, batches of inputs or `calibrate`'s result, and a model, it is the outputs that are kept
    close; without, the weights. The rate-distortion curves of all weights are in the result's `curves`,
    and in the file of that name, where the next budget for the same model finds them.

    With a `method` instead, one that wants data needs `calibration` too. The layers are then visited in
    execution order, and each sees the inputs that the layers compressed before it produce (the original's
    with `sequential=False`).

    `layers` maps patterns to methods of their own and `exclude` lists patterns to keep raw; a pattern is
    a glob, or a regular expression behind `re:`. With a method, norms, biases and the first convolution
    stay raw and the classifier gets 4-bit codes: plan/rules.py has the rules, and each tensor's `note` the
    one it met.

    A `recipe` states all of this: a file, the name of a family ("resnet"; `factorpack recipes` lists them),
    or "auto" for the family whose names the model has. The caller's own `layers` and `exclude` come before
    it. A budget takes from it what is kept raw.

    >>> packed = compress(model, ratio=20, calibration=batches)  # doctest: +SKIP
    >>> packed = compress(model, QSPCA(rank=128, latent_bits=3, sparsity=0.2))  # doctest: +SKIP
    """
    opened = open_source(source)
    if calibration is not None and not isinstance(source, nn.Module):
        raise SourceError(f"calibration runs a model, and the source is a {type(source).__name__}")
    model = source if isinstance(source, nn.Module) else None
    budgets = [budget for budget in (ratio, max_bytes, max_loss) if budget is not None]
    _, rules = asked(recipe, opened, method, layers or {}, exclude, DEFAULT_METHOD, bool(budgets))
    if budgets:
        if len(budgets) > 1 or method is not None:
            raise PlanError("give one of a method, ratio, max_bytes and max_loss")
        kept = Path(curves) if curves is not None else None
        planner = planner or Planner()
        work = Work(opened, model, calibration, planner, rules.layers, rules.exclude, kept, progress)
        if max_loss is not None:
            tensors, measured = compress_to_loss(work, max_loss)
        else:
            wanted = budget_bytes(opened, ratio, max_bytes)
            tensors, measured = compress_to_budget(work, wanted)
        packed = Packed(tensors, opened.aliases)
        packed.curves = measured
        return packed
    if planner is not None or curves is not None:
        raise PlanError("a planner and its curves meet a budget: give a ratio, max_bytes or max_loss")
    plan = rules.plan(opened)
    if model is None or calibration is None:
        return Packed(dict(_encode_all(opened, plan, progress)), opened.aliases)
    encoded = dict(_encode_calibrated(model, opened, plan, calibration, sequential, progress))
    return Packed({name: encoded[name] for name in plan}, opened.aliases)


def compress_to(
    path: str | Path,
    source: Checkpoint,
    method: Method | None = None,
    *,
    ratio: float | None = None,
    max_bytes: int | None = None,
    layers: Mapping[str, Method] | None = None,
    exclude: Sequence[str] = (),
    recipe: str | Path | None = None,
    planner: Planner | None = None,
    engine: Engine | None = None,
    progress: bool = True,
) -> Packed:
    """`compress` and `save` in one pass that, with a method or an engine, never holds more than one tensor.

    With an `engine` of `factorpack.engine` many workers take a tensor each. The source must then be a path.
    Finished tensors wait in the folder `path`.parts, where the same call goes on after it was killed. With a
    method the file is the one made without an engine; into a budget, which is met from the weights alone, it
    is the same for any number of workers.

    >>> fp.compress_to("packed.safetensors", "folder/", fp.Scalar(4), engine=Local(8))  # doctest: +SKIP
    """
    if isinstance(source, str | Path):
        check_output(Path(path), source, recipe_file(recipe))
    budgets = [budget for budget in (ratio, max_bytes) if budget is not None]
    if budgets and engine is None:
        budget: dict[str, Any] = {"ratio": ratio, "max_bytes": max_bytes, "planner": planner}
        rest: dict[str, Any] = {"layers": layers, "exclude": exclude, "recipe": recipe, "progress": progress}
        save(compress(source, method, **budget, **rest), path)
        return load(path)
    opened = open_source(source)
    _, rules = asked(recipe, opened, method, layers or {}, exclude, DEFAULT_METHOD, bool(budgets))
    if engine is None:
        write_packed(path, _encode_all(opened, rules.plan(opened), progress), opened.aliases)
    elif not budgets:
        compress_in_parts(Path(path), source, rules.plan(opened), opened, engine, progress)
    else:
        if len(budgets) > 1 or method is not None:
            raise PlanError("give one of a method, ratio and max_bytes")
        wanted = budget_bytes(opened, ratio, max_bytes)
        settings = (planner or Planner(), rules.layers, rules.exclude)
        work = Work(opened, None, None, *settings, progress=progress)
        compress_to_budget_in_parts(Path(path), source, work, wanted, engine)
    return load(path)


def save(packed: Packed, path: str | Path) -> None:
    """Writes a packed model. The file appears under its name only when it is whole."""
    write_packed(path, packed.items(), packed.aliases)
    packed._reader = Reader(path)


def load(path: str | Path) -> Packed:
    """Opens a packed file: everything is checked now, the tensors are read when they are asked for."""
    reader = Reader(path)
    return Packed(reader, reader.schema.aliases, reader)


def export(packed: Packed, path: str | Path, progress: bool = True) -> None:
    """Writes the decoded weights as an ordinary safetensors file, holding one tensor at a time."""
    check_output(Path(path), packed.path)
    names = [*packed, *packed.aliases]
    encoded = packed.shapes()
    with Progress("decoding", sum(torch.Size(encoded[name][1]).numel() for name in names), progress) as bar:
        write_plain(Path(path), {name: encoded[name] for name in names}, _decoded(packed, names, bar))


def _run_once(model: nn.Module, example: Any) -> None:
    with evaluating(model), torch.inference_mode():
        forward(model, example)


def _decoded(packed: Packed, names: Sequence[str], bar: Progress) -> Iterator[Tensor]:
    for name in names:
        weight = decode(packed[name])
        yield weight
        bar.advance(name, weight.numel())


def _encode_all(source: Source, plan: Mapping[str, Choice], progress: bool) -> Iterator[tuple[str, Encoded]]:
    with Progress("compressing", _numel(source), progress) as bar:
        for name, choice in plan.items():
            bar.show(name)
            yield name, encode(name, source, choice)
            bar.advance(name, source.entries[name].numel)


def _encode_calibrated(
    model: nn.Module,
    source: Source,
    plan: Mapping[str, Choice],
    calibration: Calibration | Iterable[Any],
    sequential: bool,
    progress: bool,
) -> Iterator[tuple[str, Encoded]]:
    """Layers in execution order, each with a sample where its method wants one; then what never runs."""
    wanted = {name: samples_of(choice.method) for name, choice in plan.items()}
    with evaluating(model):
        if not isinstance(calibration, Calibration):
            calibration = calibrate(model, calibration, max([*wanted.values(), 1]))
        running = [name for layer in calibration.order if (name := weight_of(layer)) in plan]
        idle = [name for name, samples in wanted.items() if samples and name not in running]
        if idle:
            raise SourceError(
                f"{idle[0]!r} does not run on the calibration data: exclude it or give it a method"
            )
        compressed = copy.deepcopy(model) if sequential else model
        targets = dict(compressed.named_parameters())
        order = [*running, *(name for name in plan if name not in set(running))]
        with Progress("compressing", _numel(source), progress) as bar:
            for name in order:
                bar.show(name)
                layer = name.removesuffix("weight").removesuffix(".")
                sample = (
                    _sample(calibration, layer, model, compressed, plan[name].method)
                    if wanted[name]
                    else None
                )
                encoded = encode(name, source, plan[name], sample)
                if sequential and name in targets:
                    targets[name].data.copy_(decode(encoded))
                yield name, encoded
                bar.advance(name, encoded.numel)


def _sample(
    calibration: Calibration, layer: str, model: nn.Module, compressed: nn.Module, method: Method
) -> LayerSample | LayerMoments | None:
    """What a method wants to know of a layer; a layer whose inputs cannot be unfolded has no moments."""
    if not wants_moments(method):
        return calibration.sample(layer, model, compressed)
    if not has_moments(model.get_submodule(layer)):
        return None
    return calibration.moments([layer], model, None if compressed is model else compressed)[layer]


def _numel(source: Source) -> int:
    return sum(entry.numel for entry in source.entries.values())
