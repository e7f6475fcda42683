"""`compress`: a model or a checkpoint into a `Packed`, by a method or into a budget."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from factorpack.batches import evaluating
from factorpack.budget.goals import LOSS_TRIES, budget_bytes, compress_to_bytes, compress_to_loss
from factorpack.budget.phases import phases_of
from factorpack.budget.planner import BudgetRequest, Planner
from factorpack.budget.tasks import compress_to_bytes_over
from factorpack.calibration.calibrate import Calibration, calibrate
from factorpack.calibration.streaming import open_streamed, streaming
from factorpack.calibration.synthetic import Synthetic, make_batches, read_calibration
from factorpack.calibration.walk import Walk
from factorpack.decoding import decode
from factorpack.engine import Engine
from factorpack.errors import PlanError, SourceError, while_compressing
from factorpack.format.overwrite import check_output
from factorpack.format.packed_file import write_packed
from factorpack.methods import Method
from factorpack.packed import Packed, load, save
from factorpack.per_tensor import compress_per_tensor, work_folder
from factorpack.planning.families import DEFAULT_METHOD, recipe_file, resolve_rules
from factorpack.planning.rules import Choice
from factorpack.progress import Job, Progress, ProgressOption, Showing
from factorpack.record import Encoded, LayerMoments, LayerSample, weight_of
from factorpack.solve.moments import has_moments
from factorpack.source import Checkpoint, Source, open_source


def compress(
    source: Checkpoint,
    method: Method | None = None,
    *,
    key: str | None = None,
    ratio: float | None = None,
    max_bytes: int | None = None,
    max_loss: float | None = None,
    layers: Mapping[str, Method] | None = None,
    exclude: Sequence[str] = (),
    recipe: str | Path | None = None,
    calibration: Calibration | Iterable[Any] | Synthetic | None = None,
    sequential: bool = True,
    planner: Planner | None = None,
    curves: str | Path | None = None,
    to: str | Path | None = None,
    engine: Engine | None = None,
    progress: ProgressOption = True,
) -> Packed:
    """Compresses a model, a state dict or a checkpoint on disk: with `method`, or into a budget.

    A checkpoint is a `.safetensors`, `.npz` or `.gguf` file, a torch file (`.pt`, `.pth`, `.bin`, `.ckpt`,
    `.pth.tar`), or a Hugging Face folder. Where a torch file holds several sets of weights, `key` names one. The
    logger `factorpack.source` says which weights were read, what was left out, and what was renamed.

    A budget is one of `ratio` (FP32 bytes over the file's bytes), `max_bytes`, and `max_loss` (nats of
    Kullback-Leibler divergence from the original's predictions on an eighth of the calibration data, which
    is held out). Steps, bases, ranks, bits and zeros are then chosen for every weight; `planner` says how.
    With a model and `calibration` (batches of inputs, or the result of `calibrate`) the outputs are kept
    close; without, the weights. The rate-distortion curves of all weights are in the result's `curves`, and
    in the file `curves`, where the next budget for the same model finds them.

    `calibration="synthetic"` makes inputs where there are none: for a network with batch norms, inputs that give
    every norm the statistics that it has stored; for a language model, texts that it writes itself. A
    `factorpack.calibration.synthetic.Synthetic` in its place says their size; the planner says how many.

    With a `method` that uses data, give `calibration` too. Layers are then compressed in execution order, and
    each sees the outputs of the layers compressed before it (the original's with `sequential=False`).

    `layers` maps patterns to methods and `exclude` lists patterns to keep raw; a pattern is a glob, or a
    regular expression after `re:`. With a method, norms, biases and the first convolution stay raw and the
    classifier gets 4-bit codes: planning/rules.py has the rules, and each tensor's `note` says which applied.

    A `recipe` sets all of this: a file, the name of a family ("resnet"; `factorpack recipes` lists them), or
    "auto" for the family that the model's tensor names match. The caller's `layers` and `exclude` take
    precedence. A budget uses only what the recipe keeps raw.

    With `calibration`, a budget also takes a transformers folder, for models that fit neither a GPU nor
    memory: weights are read block by block, and only those of one block and its activations are on the GPU.
    Sensitivities are then from 16 inputs, and `refine` is off, because it runs the whole model for every weight.

    `to` is a file to write: with a method, or over an engine, no more than one tensor is then in memory at a
    time. An `engine` of `factorpack.engine` hands each tensor to a worker, which reads the checkpoint itself:
    the source is then a path. With a method the file is the same as without an engine; a budget from the
    weights alone gives the same file for any number of workers. With `calibration` the source is a model, whose
    classes workers must be able to import. They measure sensitivities batch by batch, and curves and their
    refinement weight by weight; this process runs the layers in order and codes them. On a CPU the file is
    the one that a single process with one thread makes, where this process has one thread.

    `progress` shows one bar for the whole job, on a terminal or in a notebook. A function in its place is called
    with each `factorpack.progress.ProgressUpdate`.

    What a budget or an engine has finished waits in the folder `to`.parts. If the call is killed, the same
    call resumes from there, and on a CPU with as many threads it ends in the same bytes.

    >>> packed = compress(model, ratio=20, calibration=batches)  # doctest: +SKIP
    >>> packed = compress(model, QSPCA(rank=128, latent_bits=3, sparsity=0.2))  # doctest: +SKIP
    >>> packed = compress("folder/", Scalar(4), to="packed.safetensors", engine=Local(8))  # doctest: +SKIP
    """
    if to is not None and isinstance(source, str | Path):
        check_output(Path(to), source, recipe_file(recipe))
    opened, calibration = open_source(source, key).say(), read_calibration(calibration)
    budgets = [budget for budget in (ratio, max_bytes, max_loss) if budget is not None]
    _check_combination(source, method, budgets, calibration, planner or curves)
    model = source if isinstance(source, nn.Module) else None
    if engine is not None and calibration is not None:
        _check_calibrated_engine(source, to, budgets)
    if calibration is not None and isinstance(source, str | Path):
        if max_loss is not None:
            raise PlanError(
                "max_loss runs the whole model again and again: give a ratio or max_bytes to stream"
            )
        model, opened = open_streamed(Path(source), opened)
    _, rules = resolve_rules(recipe, opened, method, layers or {}, exclude, DEFAULT_METHOD, bool(budgets))
    kept = Path(curves) if curves is not None else None
    planner = planner or Planner()
    tries = 0 if not budgets else 1 if max_loss is None else LOSS_TRIES
    phases = phases_of(tries, calibration is not None, isinstance(calibration, Synthetic))
    with Job(phases, progress) as job:
        request = None
        if budgets:
            settings = (planner, rules.layers, rules.exclude, kept, job)
            request = BudgetRequest(opened, model, calibration, *settings)
        if engine is not None and calibration is None:
            if to is None or max_loss is not None or curves is not None:
                raise PlanError(
                    "an engine writes a file: say which with to=; without calibration it works on the weights alone, "
                    "so leave max_loss and curves out"
                )
            if request is None:
                compress_per_tensor(Path(to), source, rules.plan(opened), opened, engine, job)
            else:
                wanted = budget_bytes(opened, ratio, max_bytes)
                compress_to_bytes_over(engine, Path(to), source, request, wanted)
            return load(to)
        if request is not None:
            resumable = work_folder(Path(to).absolute()) if to is not None else nullcontext()
            with streaming(model), resumable as parts:
                return _saved(
                    _into_budget(replace(request, parts=parts, engine=engine), ratio, max_bytes, max_loss),
                    to,
                    job,
                )
        plan = rules.plan(opened)
        if model is not None and calibration is not None:
            encoded = dict(_encode_calibrated(model, opened, plan, calibration, sequential, job))
            return _saved(Packed({name: encoded[name] for name in plan}, opened.aliases), to, job)
        tensors = _encode_all(opened, plan, job)
        if to is None:
            return Packed(dict(tensors), opened.aliases)
        write_packed(to, tensors, opened.aliases)
        return load(to)


def _check_combination(
    source: Checkpoint, method: Method | None, budgets: Sequence[float], calibration: object, planning: object
) -> None:
    """Refuses what does not go together, and what is no method."""
    if method is not None and not isinstance(method, Method):
        raise PlanError(
            f"the method is {method!r}, expected an object that has its settings, as fp.Scalar(4)",
            found=method,
        )
    streamable = isinstance(source, str | Path) and budgets
    if calibration is not None and not isinstance(source, nn.Module) and not streamable:
        raise SourceError(
            f"calibration runs a model, and the source is a {type(source).__name__} (a budget also takes a "
            "transformers folder)"
        )
    if len(budgets) > 1 or (budgets and method is not None):
        raise PlanError("give one of a method, ratio, max_bytes and max_loss")
    if not budgets and planning is not None:
        raise PlanError("a planner and its curves meet a budget: give a ratio, max_bytes or max_loss")


def _check_calibrated_engine(source: Checkpoint, to: str | Path | None, budgets: Sequence[float]) -> None:
    """Refuses what workers cannot do with calibration data."""
    if isinstance(source, str | Path):
        raise PlanError(
            "a model on disk is calibrated block by block in one process: open it and compress that, or leave "
            "the engine out"
        )
    if to is None or not budgets:
        raise PlanError(
            "with calibration an engine meets a budget and writes a file: give a ratio, max_bytes or max_loss, and "
            "to=; a method compresses each layer after those before it, so leave its engine out"
        )


def _into_budget(
    request: BudgetRequest, ratio: float | None, max_bytes: int | None, max_loss: float | None
) -> Packed:
    if max_loss is not None:
        found = compress_to_loss(request, max_loss)
    else:
        found = compress_to_bytes(request, budget_bytes(request.source, ratio, max_bytes))
    packed = Packed(found.tensors, request.source.aliases, streams=found.streams)
    packed.curves, packed.estimated_loss = found.curves, found.estimated_loss
    return packed


def _saved(packed: Packed, path: str | Path | None, job: Job) -> Packed:
    """A packed model as its file holds it, where it is to have one."""
    if path is None:
        return packed
    with Progress("saving", 1, job):
        save(packed, path)
        loaded = load(path)
    loaded.curves, loaded.estimated_loss = packed.curves, packed.estimated_loss
    return loaded


def _encode_all(
    source: Source, plan: Mapping[str, Choice], progress: Showing
) -> Iterator[tuple[str, Encoded]]:
    with Progress("compressing", _numel(source), progress) as bar:
        for name, choice in plan.items():
            bar.show(name)
            yield name, _encode(name, source, choice)
            bar.advance(name, source.entries[name].numel)


def _encode_calibrated(
    model: nn.Module,
    source: Source,
    plan: Mapping[str, Choice],
    calibration: Calibration | Iterable[Any] | Synthetic,
    sequential: bool,
    progress: Showing,
) -> Iterator[tuple[str, Encoded]]:
    """Layers in execution order, each with a sample where its method wants one; then those that never run."""
    wanted = {name: choice.method.samples for name, choice in plan.items()}
    samples = max([*wanted.values(), 1])
    with evaluating(model):
        if isinstance(calibration, Synthetic):
            calibration = make_batches(model, calibration, samples, progress)
        if not isinstance(calibration, Calibration):
            calibration = calibrate(model, calibration, samples)
        running = [name for layer in calibration.order if (name := weight_of(layer)) in plan]
        idle = [name for name, samples in wanted.items() if samples and name not in running]
        if idle:
            raise SourceError(
                f"{idle[0]!r} does not run on the calibration data: exclude it or give it a method"
            )
        compressed = copy.deepcopy(model) if sequential else model
        targets = dict(compressed.named_parameters())
        walk = Walk(calibration, model, compressed if sequential else None, _with_moments(plan, running))
        order = [*running, *(name for name in plan if name not in set(running))]
        with Progress("compressing", _numel(source), progress) as bar:
            for name in order:
                bar.show(name)
                layer = _layer_of(name)
                sample = (
                    _sample(walk, model.get_submodule(layer), layer, plan[name].method)
                    if wanted[name]
                    else None
                )
                encoded = _encode(name, source, plan[name], sample)
                if sequential and name in targets:
                    with torch.no_grad():
                        targets[name].copy_(decode(encoded))
                yield name, encoded
                bar.advance(name, encoded.numel)


def _encode(
    name: str, source: Source, choice: Choice, inputs: LayerSample | LayerMoments | None = None
) -> Encoded:
    with while_compressing(name):
        return choice.encode(source.weight(name, inputs))


def _with_moments(plan: Mapping[str, Choice], running: Sequence[str]) -> list[str]:
    """Layers whose methods want the moments of their inputs."""
    wanting = [name for name in running if plan[name].method.samples and plan[name].method.wants_moments]
    return [_layer_of(name) for name in wanting]


def _layer_of(weight: str) -> str:
    return weight.removesuffix("weight").removesuffix(".")


def _sample(walk: Walk, module: nn.Module, layer: str, method: Method) -> LayerSample | LayerMoments | None:
    """What a method wants to know about a layer; a layer whose inputs cannot be unfolded has no moments."""
    if not method.wants_moments:
        return walk.sample(layer)
    return walk.moments(layer) if has_moments(module) else None


def _numel(source: Source) -> int:
    return sum(entry.numel for entry in source.entries.values())
