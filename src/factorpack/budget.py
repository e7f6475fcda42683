"""Compression to a number of bytes: plan every weight's step on curves, then encode and close the gap."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import log2, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.calibrate import Calibration, calibrate, evaluating, forward
from factorpack.decode import decode
from factorpack.errors import FactorpackError, PlanError
from factorpack.format.container import Writer
from factorpack.methods import Keep, Method, Scalar
from factorpack.methods.protocol import check_type
from factorpack.norms import DECIDED, correct_mean, norms_after, small_leftovers
from factorpack.plan.curves import Curve, allocate
from factorpack.plan.pose import Posed, Rounding, best_pose, coded_bytes, curve, pose
from factorpack.plan.rules import Rules
from factorpack.plan.sensitivity import as_logits, sensitivities
from factorpack.progress import Progress
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.code_length import HIGH_RATE
from factorpack.solve.moments import has_moments
from factorpack.solve.second_order import DAMPING
from factorpack.source import Source, weight_of

AIM = 0.997
"""The share of a budget that is aimed at; between LEAST and 1 is good."""
LEAST = 0.991
SENSITIVITY_SAMPLES = 256
HELD_SHARE = 0.125
MOMENT_BYTES = 1 << 30
"""Moments of as many layers as fit are gathered in one pass over the calibration data."""


@dataclass(frozen=True, slots=True)
class Planner:
    """How a budget is met; every ingredient can be left out, to see what it is worth."""

    samples: int = 256
    """Calibration inputs to use: more are better, up to a thousand."""
    second_order: bool = True
    """Error feedback on the layer's inputs; without it numbers are rounded one by one."""
    sequential: bool = True
    """Each layer sees what the layers compressed before it produce, and makes up for them."""
    basis: bool = True
    equal_slope: bool = True
    """Steps from each layer's sensitivity; without it one step for all, relative to each weight's spread."""
    correct_means: bool = True
    fold_norms: bool = True
    price: float = HIGH_RATE
    damping: float = DAMPING

    def __post_init__(self) -> None:
        check_type("samples", self.samples, int)
        if self.samples < 1 or not self.price >= 0 or not self.damping > 0:
            raise PlanError(
                f"samples {self.samples}, price {self.price}, damping {self.damping}: "
                "expected at least 1, at least 0, and above 0"
            )

    @property
    def rounding(self) -> Rounding:
        return Rounding(self.price, self.damping, self.basis)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What is to be compressed, with what is known of it and what the caller decided."""

    source: Source
    model: nn.Module | None
    calibration: Calibration | Iterable[Any] | None
    planner: Planner
    layers: Mapping[str, Method]
    exclude: Sequence[str]
    progress: bool = True


class Budgeter:
    """One model on its way into a number of bytes."""

    def __init__(self, work: Work, calibration: Calibration | None) -> None:
        self.source, self.model, self.planner = work.source, work.model, work.planner
        self.calibration, self.progress = calibration, work.progress
        self.fixed: dict[str, Encoded] = {}
        """Tensors that are no weights, or that the caller decided on."""
        self.coded: list[str] = []
        for name, choice in Rules(Scalar(8), work.layers, work.exclude).plan(work.source).items():
            if choice.note or isinstance(choice.method, Keep):
                groups = self.source.transposed_groups.get(name, 0)
                encoded = choice.method.encode(self.source.entries[name].load(), groups)
                self.fixed[name] = encoded.noted(choice.note) if choice.note else encoded
            else:
                self.coded.append(name)
        if not self.coded:
            raise PlanError("there is no weight to compress: all tensors are vectors, integers or excluded")
        self.module_of: dict[str, str] = {}
        self.norm_of: dict[str, str] = {}
        self.sensitivity: dict[str, float] = {}
        if self.model is not None and calibration is not None:
            self.module_of = _modules(self.model, calibration, self.coded)
            self.norm_of = norms_after(self.model, calibration.batches[0])
            if self.planner.equal_slope:
                found = sensitivities(
                    self.model, calibration, list(self.module_of.values()), SENSITIVITY_SAMPLES
                )
                self.sensitivity = {name: found[module] for name, module in self.module_of.items()}

    def curves(self, bits: float) -> dict[str, Curve]:
        """A curve for every weight, about `bits` a weight, from the original network's inputs."""
        found: dict[str, Curve] = {}
        with Progress("planning", self._numel(), self.progress) as bar:
            for names, moments in self._moments_in_chunks():
                for name in names:
                    bar.show(name)
                    weight = self.source.entries[name].load()
                    groups = self.source.transposed_groups.get(name, 0)
                    posed = best_pose(
                        weight,
                        groups,
                        moments.get(name),
                        self.sensitivity.get(name),
                        bits,
                        self.planner.rounding,
                    )
                    found[name] = curve(posed, bits)
                    bar.advance(name, weight.numel())
        return _with_unknown(found, self.sensitivity)

    def run(self, max_bytes: int) -> tuple[dict[str, Encoded], dict[str, Curve]]:
        """The tensors of a file of at most `max_bytes`, and the curves they were planned on."""
        overhead = self._least_bytes(max_bytes)
        weights = self._numel()
        curves = self.curves(8 * (max_bytes - overhead) / weights)
        steps = allocate(curves, max_bytes * AIM - overhead)
        planned = {name: curves[name].bytes_at(steps[name]) for name in self.coded}
        compressed = copy.deepcopy(self.model) if self.calibration is not None else None
        done: dict[str, _Done] = {}
        order = self._order()
        left = max_bytes * AIM - overhead
        with Progress("compressing", weights, self.progress) as bar:
            for place, name in enumerate(order):
                bar.show(name)
                share = left / max(sum(planned[later] for later in order[place:]), 1.0)
                done[name] = self._encode(
                    name, curves[name].tile, steps[name], planned[name] * share, compressed
                )
                left -= coded_bytes(done[name].encoded)
                if name != self._closer(planned):
                    done[name] = replace(done[name], posed=None)
                bar.advance(name, self.source.entries[name].load().numel())
        return self._close(max_bytes, done, self._closer(planned), compressed), curves

    def _encode(self, name: str, tile: int, step: float, aim: float, compressed: nn.Module | None) -> _Done:
        """One weight at about `aim` bytes, put into the compressed network."""
        try:
            moments = self._moments(name, compressed)
            groups = self.source.transposed_groups.get(name, 0)
            weight = self.source.entries[name].load()
            used = moments if self.planner.second_order else None
            posed = pose(weight, groups, used, self.sensitivity.get(name), tile, self.planner.rounding)
            step, encoded = _meet(posed, step, aim)
        except FactorpackError as error:
            error.add_note(f"while compressing tensor {name!r}")
            raise
        self._put(name, encoded, weight, moments, compressed)
        return _Done(encoded, step, posed, moments)

    def _put(
        self,
        name: str,
        encoded: Encoded,
        before: Tensor,
        moments: LayerMoments | None,
        compressed: nn.Module | None,
    ) -> None:
        """Replaces a weight in the compressed network and gives its layer the mean output it had."""
        module = self.module_of.get(name)
        if compressed is None or module is None:
            return
        layer = compressed.get_submodule(module)
        assert isinstance(layer.weight, Tensor)
        weight = decode(encoded).to(layer.weight.device)
        layer.weight.data.copy_(weight)
        if moments is not None and self.planner.correct_means:
            norm = self.norm_of.get(module)
            correct_mean(
                layer,
                compressed.get_submodule(norm) if norm else None,
                weight.flatten(1),
                before.flatten(1),
                moments,
            )

    def _close(
        self, max_bytes: int, done: dict[str, _Done], closer: str, compressed: nn.Module | None
    ) -> dict[str, Encoded]:
        """Changes the closer's step until the file itself is between LEAST and all of the budget."""
        known: list[tuple[float, int]] = []
        best: tuple[int, dict[str, Encoded]] | None = None
        for _ in range(12):
            tensors = self._tensors({name: each.encoded for name, each in done.items()}, compressed)
            size = file_bytes(tensors, self.source.aliases)
            if size <= max_bytes and (best is None or size > best[0]):
                best = size, tensors
            if LEAST * max_bytes <= size <= max_bytes:
                break
            last = done[closer]
            assert last.posed is not None
            own = coded_bytes(last.encoded)
            known.append((last.step, own))
            wanted = own + AIM * max_bytes - size
            step = _next_step(known, wanted, last.posed.weight.numel())
            encoded = last.posed.at([step])[0][0]
            moments = last.moments
            if moments is not None:  # the mean output is right already, for the codes it has now
                moments = replace(moments, original_mean=moments.mean)
            self._put(closer, encoded, decode(last.encoded), moments, compressed)
            done[closer] = replace(last, encoded=encoded, step=step)
        if best is None:
            raise PlanError(f"no file of at most {max_bytes} bytes was found; the smallest had {size}")
        return best[1]

    def _tensors(self, coded: Mapping[str, Encoded], compressed: nn.Module | None) -> dict[str, Encoded]:
        """Every tensor in the source's order, leftovers as the compressed network has them now."""
        fixed = dict(self.fixed)
        if compressed is not None:
            state = compressed.state_dict()
            for name, encoded in fixed.items():
                if encoded.kind == "keep" and not encoded.note.startswith(DECIDED) and name in state:
                    fresh = Keep().encode(state[name])
                    fixed[name] = fresh.noted(encoded.note) if encoded.note else fresh
        small = small_leftovers(fixed, self.model, self.planner.fold_norms)
        return {name: coded[name] if name in coded else small[name] for name in self.source.entries}

    def _least_bytes(self, max_bytes: int) -> int:
        """What everything but codes takes; an error where a file without a single code would be too large."""
        empty = {}
        for name in self.coded:
            entry = self.source.entries[name]
            empty[name] = Encoded(
                "constant", entry.shape, entry.dtype, {"value": torch.zeros(1, dtype=entry.dtype)}
            )
        least = file_bytes(self._tensors(empty, None), self.source.aliases)
        fillers = sum(-(-torch.Size(self.source.entries[name].shape).numel() // 1024) for name in self.coded)
        if least >= max_bytes:
            raise PlanError(
                f"{max_bytes} bytes cannot be met: with every weight zero the file would still have {least}, "
                "for what is kept, headers and the reader's safety margin of a byte for 1,024 numbers"
            )
        return least - fillers

    def _moments_in_chunks(self) -> Iterator[tuple[list[str], dict[str, LayerMoments]]]:
        """Weights in execution order, with the original network's moments where they are used."""
        chunk: list[str] = []
        held = 0
        for name in [*self._order(), ""]:
            size = _moment_bytes(self.source.entries[name].shape) if name in self.module_of else 0
            if chunk and (not name or held + size > MOMENT_BYTES):
                modules = [self.module_of[one] for one in chunk if one in self.module_of]
                found = {}
                if (
                    modules
                    and self.calibration is not None
                    and self.model is not None
                    and self.planner.second_order
                ):
                    found = self.calibration.moments(modules, self.model)
                yield (
                    chunk,
                    {one: found[self.module_of[one]] for one in chunk if self.module_of.get(one) in found},
                )
                chunk, held = [], 0
            chunk, held = [*chunk, name], held + size

    def _moments(self, name: str, compressed: nn.Module | None) -> LayerMoments | None:
        module = self.module_of.get(name)
        if module is None or self.calibration is None or self.model is None:
            return None
        other = compressed if self.planner.sequential else None
        return self.calibration.moments([module], self.model, other)[module]

    def _order(self) -> list[str]:
        """Execution order, then what does not run or whose inputs are unknown."""
        running = list(self.module_of)
        return [*running, *(name for name in self.coded if name not in self.module_of)]

    def _closer(self, planned: Mapping[str, float]) -> str:
        """The last weight with a fair share of the bytes: changing it late disturbs least."""
        enough = 0.04 * sum(planned.values())
        return next(
            (name for name in reversed(self._order()) if planned[name] >= enough),
            max(planned, key=lambda n: planned[n]),
        )

    def _numel(self) -> int:
        return sum(torch.Size(self.source.entries[name].shape).numel() for name in self.coded)


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    encoded: Encoded
    step: float
    posed: Posed | None
    moments: LayerMoments | None


def compress_to_budget(work: Work, max_bytes: int) -> dict[str, Encoded]:
    """Tensors whose file has at most `max_bytes`, and at least 99 % of that; see `Planner` for how."""
    check_type("max_bytes", max_bytes, int)
    if max_bytes < 1:
        raise PlanError(f"max_bytes is {max_bytes}, expected at least 1")
    with _evaluating(work.model):
        return Budgeter(work, _calibration(work)).run(max_bytes)[0]


def compress_to_loss(work: Work, max_loss: float) -> dict[str, Encoded]:
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
        original = _source_bytes(work.source)
        best: dict[str, Encoded] | None = None
        low, high = 2.0, 128.0  # ratios: the first is taken to be good enough, the last too much
        for ratio in (16.0, *[0.0] * 4):
            ratio = ratio or sqrt(low * high)
            tensors = budgeter.run(int(original / ratio))[0]
            if divergence(work.model, tensors, work.source.aliases, held) <= max_loss:
                low, best = ratio, tensors
            else:
                high = ratio
        if best is None:
            raise PlanError(
                f"at {low:.3g} times smaller the answers still diverge by more than {max_loss} nats"
            )
        return best


def budget_bytes(source: Source, ratio: float | None) -> int:
    """Bytes of a file `ratio` times smaller than the checkpoint in FP32."""
    if not isinstance(ratio, int | float) or not 1 < ratio < 1e6:
        raise PlanError(f"ratio is {ratio!r}, expected a number above 1")
    return int(_source_bytes(source) / ratio)


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
            wanted, found = (
                as_logits(forward(net, batch)).double().log_softmax(-1) for net in (model, packed)
            )
        total += float((wanted.exp() * (wanted - found)).sum())
        count += wanted[..., 0].numel()
    return total / count


def _calibration(work: Work) -> Calibration | None:
    if work.calibration is None or isinstance(work.calibration, Calibration):
        return work.calibration
    if work.model is None:
        raise PlanError("calibration runs a model: give one, not only its weights")
    return calibrate(work.model, work.calibration, work.planner.samples)


def _evaluating(model: nn.Module | None) -> AbstractContextManager[None]:
    return nullcontext() if model is None else evaluating(model)


def _source_bytes(source: Source) -> int:
    """In FP32; integers as they are."""
    return sum(
        torch.Size(entry.shape).numel() * (4 if entry.dtype.is_floating_point else entry.dtype.itemsize)
        for entry in source.entries.values()
    )


def file_bytes(tensors: Mapping[str, Encoded], aliases: Mapping[str, str]) -> int:
    """Of the file itself, written and measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packed.safetensors"
        with Writer(path) as writer:
            for name, encoded in tensors.items():
                writer.add(name, encoded)
            for alias, target in aliases.items():
                writer.alias(alias, target)
        return path.stat().st_size


def _modules(model: nn.Module, calibration: Calibration | None, coded: Sequence[str]) -> dict[str, str]:
    """Weights of layers that run on the calibration data and have moments: name -> layer, as they run."""
    if calibration is None:
        return {}
    found = {}
    for layer in calibration.order:
        name = weight_of(layer)
        if name in coded and has_moments(model.get_submodule(layer)):
            found[name] = layer
    return found


def _moment_bytes(shape: tuple[int, ...]) -> int:
    inputs = torch.Size(shape[1:]).numel()
    return 4 * inputs * inputs * (shape[0] if len(shape) > 2 and shape[1] == 1 else 1)


def _with_unknown(curves: dict[str, Curve], known: Mapping[str, float]) -> dict[str, Curve]:
    """Weights of unknown sensitivity take the median layer's: the same step relative to their spread."""
    if not known:
        return curves
    ratios = sorted(curves[name].step_at_unit_slope / curves[name].steps[0] for name in known)
    middle = ratios[len(ratios) // 2]
    return {
        name: one if name in known else replace(one, step_at_unit_slope=middle * one.steps[0])
        for name, one in curves.items()
    }


def _meet(posed: Posed, step: float, aim: float) -> tuple[float, Encoded]:
    """The step near `step` at which a weight takes about `aim` bytes, and its codes there."""
    known: list[tuple[float, int]] = []
    for _ in range(4):
        encoded = posed.at([step])[0][0]
        size = coded_bytes(encoded)
        if abs(size - aim) <= 0.01 * aim + 32:
            break
        known.append((step, size))
        step = _next_step(known, aim, posed.weight.numel())
    return step, encoded


def _next_step(known: Sequence[tuple[float, int]], wanted: float, numel: int) -> float:
    """A step closer to `wanted` bytes, from the steps tried so far: a secant on log step."""
    step, size = known[-1]
    slope = -max(numel / 8, 1.0)  # bytes an octave, where steps are fine
    if len(known) > 1 and known[-2][0] != step and known[-2][1] != size:
        slope = min((size - known[-2][1]) / log2(step / known[-2][0]), -0.05 * numel / 8)
    elif size < numel / 8:  # coarse steps: about a bit of every code that is not zero
        slope = -max(0.6 * size, 1.0)
    octaves = max(-1.5, min(1.5, (wanted - size) / slope))
    return step * float(2.0**octaves)
