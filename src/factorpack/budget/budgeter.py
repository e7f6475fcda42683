"""One model on its way into a number of bytes: curves, steps, codes, and the gap closed on real files."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from factorpack.budget.candidates import Posed, best_pose, curve, meet, pose
from factorpack.budget.curves import Curve, allocate, load_curves, save_curves, with_unknown
from factorpack.budget.embeddings import embedding_moments
from factorpack.budget.norms import DECIDED, correct_outputs, norms_after, small_leftovers
from factorpack.budget.planner import HELD_SHARE, Work
from factorpack.budget.refine import Alone, refined
from factorpack.budget.sensitivity import information
from factorpack.budget.step_search import Best, Closing
from factorpack.calibrate import Calibration
from factorpack.decoding import decode
from factorpack.errors import PlanError, while_compressing
from factorpack.format.packed_file import file_bytes
from factorpack.format.schema import EXPANSION
from factorpack.format.streams import coded_bytes, raw_bytes
from factorpack.methods import Keep, Scalar
from factorpack.planning.rules import Choice, Rules
from factorpack.progress import Progress
from factorpack.quantize.uniform import MAX_STORED_BITS
from factorpack.record import Encoded, LayerMoments, weight_of
from factorpack.solve.moments import has_moments
from factorpack.source import Entry

AIM = 0.997
"""The share of a budget that is aimed at; between LEAST and 1 is good."""
LEAST = 0.991
CLOSING_TRIES = 16
SENSITIVITY_SAMPLES = 256
REFINEMENTS = 2
"""How often a plan is put right by measurement: the second time at the steps of the first."""
FEWEST_TO_SPLIT = 16
"""Of fewer inputs none are kept aside to refine the plan on."""
MOMENT_BYTES = 1 << 30
"""Moments of as many layers as fit are gathered in one pass over the calibration data."""


class Budgeter:
    """One model on its way into a number of bytes."""

    def __init__(self, work: Work, calibration: Calibration | None) -> None:
        self.source, self.model, self.planner = work.source, work.model, work.planner
        self.progress = work.progress
        held = None
        refine = self.planner.refine and self.planner.equal_slope
        if calibration is not None and refine and len(calibration) >= FEWEST_TO_SPLIT:
            calibration, held = calibration.split(HELD_SHARE)
        self.calibration = calibration
        self.alone = Alone(self.model, held) if self.model is not None and held is not None else None
        self.curve_file = work.curves
        self.fixed: dict[str, Encoded] = {}
        """Tensors that are no weights, or that the caller decided on."""
        self.coded: list[str] = []
        for name, choice in Rules(Scalar(8), work.layers, work.exclude).plan(work.source).items():
            if is_fixed(choice):
                groups = self.source.transposed_groups.get(name, 0)
                encoded = choice.method.encode(self.source.entries[name].load(), groups)
                self.fixed[name] = encoded.noted(choice.note)
            else:
                self.coded.append(name)
        if not self.coded:
            raise PlanError("there is no weight to compress: all tensors are vectors, integers or excluded")
        self.module_of: dict[str, str] = {}
        self.norm_of: dict[str, str] = {}
        self.sensitivity: dict[str, float] = {}
        self.metric: dict[str, LayerMoments] = {}
        """What an error in a row of an embedding costs: its rows are looked up, and multiply nothing."""
        if self.model is not None and calibration is not None:
            self.module_of = _modules(self.model, calibration, self.coded)
            # A norm that stays as it is cannot put a mean right.
            self.norm_of = {
                layer: norm
                for layer, norm in norms_after(self.model, calibration.batches[0]).items()
                if not self._decided(f"{norm}.running_mean")
            }
            if self.planner.equal_slope:
                self._inform(self.model, calibration)

    def _inform(self, model: nn.Module, calibration: Calibration) -> None:
        """Learns what each weight's outputs matter, and what the rows of embeddings do."""
        tables = _tables(model, calibration, self.coded, self.source.aliases)
        layers = [*self.module_of.values(), *(layer for each in tables.values() for layer in each)]
        found = information(model, calibration, layers, SENSITIVITY_SAMPLES)
        self.sensitivity = {name: found[module].level for name, module in self.module_of.items()}
        for name, (table, *heads) in tables.items():
            seen = calibration.moments(heads, model) if heads else {}
            tied = [(seen[head].second[0], found[head].level) for head in heads]
            rows = self.source.entries[name].shape[0]
            self.metric[name], self.sensitivity[name] = embedding_moments(found[table], rows, tied)

    def curves(self, bits: float) -> dict[str, Curve]:
        """A curve for every weight, about `bits` a weight, or those kept in a file."""
        if self.curve_file is None:
            return self._measured_curves(bits)
        mark = self._fingerprint()
        kept = load_curves(self.curve_file, mark)
        if kept is None:
            kept = self._measured_curves(bits)
            save_curves(self.curve_file, kept, mark)
        return kept

    def _fingerprint(self) -> str:
        """What curves depend on: planner, weights and calibration data."""
        mark = zlib.crc32(repr(self.planner).encode())
        for name in self.coded:
            mark = zlib.crc32(name.encode() + raw_bytes(self.source.entries[name].load()), mark)
        for batch in self.calibration.batches if self.calibration is not None else []:
            for value in [batch] if isinstance(batch, Tensor) else batch.values():
                mark = zlib.crc32(raw_bytes(value), mark)
        return f"{mark:08x}"

    def _measured_curves(self, bits: float) -> dict[str, Curve]:
        found: dict[str, Curve] = {}
        codes: dict[str, list[Encoded]] = {}
        with Progress("planning", self._numel(), self.progress) as bar:
            for names, moments in self._moments_in_chunks():
                for name in names:
                    bar.show(name)
                    weight = self.source.entries[name].load()
                    groups = self.source.transposed_groups.get(name, 0)
                    known = (self._metric(name) or moments.get(name), self.sensitivity.get(name))
                    with while_compressing(name):
                        posed = best_pose(weight, groups, *known, bits, self.planner.rounding)
                        found[name], at_steps = curve(posed, bits)
                    if self.alone is not None and name in self.sensitivity:
                        codes[name] = at_steps
                    bar.advance(name, weight.numel())
        found = with_unknown(found, self.sensitivity)
        return found if self.alone is None else self._refined(self.alone, found, codes, bits)

    def _refined(
        self, alone: Alone, found: dict[str, Curve], codes: Mapping[str, list[Encoded]], bits: float
    ) -> dict[str, Curve]:
        """Curves put right by what each weight alone does at the step planned for it, and planned anew."""
        measured: dict[tuple[str, int], float] = {}
        with Progress("refining", REFINEMENTS * len(codes), self.progress) as bar:
            for _ in range(REFINEMENTS):
                steps = allocate(found, bits * self._numel() / 8)
                for name, at_steps in codes.items():
                    bar.show(name)
                    place = found[name].nearest(steps[name])
                    if (name, place) not in measured:
                        measured[name, place] = alone.divergence(name, at_steps[place])
                    found[name] = refined(found[name], place, measured[name, place])
                    bar.advance(name, 1)
                found = with_unknown(found, self.sensitivity)
        return found

    def _decided(self, name: str) -> bool:
        return name in self.fixed and self.fixed[name].note.startswith(DECIDED)

    def run(self, max_bytes: int) -> tuple[dict[str, Encoded], dict[str, Curve]]:
        """The tensors of a file of at most `max_bytes`, and the curves they were planned on."""
        overhead = self.overhead(max_bytes)
        curves = self.curves(self.bits(max_bytes - overhead))
        least = 1.01 * sum(one.bytes[-1] for one in curves.values())  # every code zero
        aim, best = AIM * max_bytes - overhead, Best[Encoded]()
        for _ in range(3):
            size, done, compressed = self._pass(curves, max(aim, least), max_bytes, best)
            if best.size >= LEAST * max_bytes:
                break
            # No single weight could make up for what was missed: aim lower, or higher, with all of them.
            aim *= max(AIM * max_bytes - overhead, 1.0) / max(size - overhead, 1.0)
        if not best.size:
            best.offer(max_bytes, *self._emptied(max_bytes, done, compressed))
        return dict(best.found), curves

    def _pass(
        self, curves: Mapping[str, Curve], aim: float, max_bytes: int, best: Best[Encoded]
    ) -> tuple[int, dict[str, _Done], nn.Module | None]:
        """Every weight in execution order, spending what is left; then the gap that remains is closed."""
        steps = allocate(curves, aim)
        planned = {name: curves[name].bytes_at(steps[name]) for name in self.coded}
        compressed = self._start()
        closer, left = closer_of(planned, self._order()), aim
        done: dict[str, _Done] = {}
        with Progress("compressing", self._numel(), self.progress) as bar:
            for name in self._order():
                bar.show(name)
                share = left / max(sum(planned[later] for later in planned if later not in done), 1.0)
                last = self._encode(name, curves[name], steps[name], planned[name] * share, compressed)
                left -= coded_bytes(last.encoded)
                done[name] = last if name == closer else replace(last, posed=None, moments=None)
                bar.advance(name, last.encoded.numel)
        return self._close(max_bytes, done, closer, compressed, best), done, compressed

    def _start(self) -> nn.Module | None:
        """A copy of the model to compress layer by layer, with the caller's own methods applied."""
        if self.model is None or self.calibration is None:
            return None
        compressed = copy.deepcopy(self.model)
        state = compressed.state_dict()
        for name, encoded in self.fixed.items():
            if encoded.kind != "keep" and name in state:
                state[name].copy_(decode(encoded))
        return compressed

    def _encode(
        self, name: str, planned: Curve, step: float, aim: float, compressed: nn.Module | None
    ) -> _Done:
        """One weight at about `aim` bytes, put into the compressed network."""
        moments = self._moments(name, compressed)
        groups = self.source.transposed_groups.get(name, 0)
        weight = self.source.entries[name].load()
        with while_compressing(name):
            used = moments if self.planner.second_order else None
            used = self._metric(name) or used
            rounding = replace(self.planner.rounding, trellis=planned.trellis)
            posed = pose(weight, groups, used, self.sensitivity.get(name), planned.tile, rounding)
            step, encoded = meet(posed, step, aim)
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
        if compressed is None:
            return
        weight = decode(encoded)
        compressed.state_dict()[name].copy_(weight)
        module = self.module_of.get(name)
        if module is not None and moments is not None and self.planner.correct_means:
            layer, norm = compressed.get_submodule(module), self.norm_of.get(module)
            correct_outputs(
                layer,
                compressed.get_submodule(norm) if norm else None,
                weight.flatten(1),
                before.flatten(1),
                moments,
                self.planner.correct_spread,
            )

    def _close(
        self,
        max_bytes: int,
        done: dict[str, _Done],
        closer: str,
        compressed: nn.Module | None,
        best: Best[Encoded],
    ) -> int:
        """Changes one weight until the file is between LEAST and all of the budget; the last file's size."""
        start = done[closer]
        assert start.posed is not None
        closing = Closing(start.encoded.numel, start.step, start.posed.rounding.price)
        for _ in range(CLOSING_TRIES):
            tensors = self._tensors({name: each.encoded for name, each in done.items()}, compressed)
            size = file_bytes(tensors, self.source.aliases)
            best.offer(max_bytes, size, tensors)
            if LEAST * max_bytes <= size <= max_bytes:
                break
            own = coded_bytes(done[closer].encoded)
            closing.after(own, own + AIM * max_bytes - size)
            posed = replace(start.posed, rounding=replace(start.posed.rounding, price=closing.price))
            self._replace(closer, closing.step, posed, done, compressed)
        return size

    def _replace(
        self, name: str, step: float, posed: Posed, done: dict[str, _Done], compressed: nn.Module | None
    ) -> None:
        last = done[name]
        encoded = posed.at([step])[0][0]
        moments = last.moments
        if moments is not None:  # the outputs are right already, for the codes it has now
            moments = replace(moments, original_mean=moments.mean, original_power=None)
        self._put(name, encoded, decode(last.encoded), moments, compressed)
        done[name] = replace(last, encoded=encoded, step=step, posed=posed)

    def _emptied(
        self, max_bytes: int, done: Mapping[str, _Done], compressed: nn.Module | None
    ) -> tuple[int, dict[str, Encoded]]:
        """The last resort of a budget barely above headers: the largest weights become zero."""
        coded = {name: each.encoded for name, each in done.items()}
        for name in sorted(coded, key=lambda one: -coded_bytes(coded[one])):
            coded[name] = zero_of(self.source.entries[name]).noted("zero: the budget leaves no room for it")
            tensors = self._tensors(coded, compressed)
            size = file_bytes(tensors, self.source.aliases)
            if size <= max_bytes:
                break
        return size, tensors

    def _tensors(self, coded: Mapping[str, Encoded], compressed: nn.Module | None) -> dict[str, Encoded]:
        """Every tensor in the source's order, leftovers as the compressed network has them now."""
        fixed = dict(self.fixed)
        if compressed is not None:
            state = compressed.state_dict()
            for name, encoded in fixed.items():
                if encoded.kind == "keep" and not self._decided(name) and name in state:
                    fixed[name] = Keep().encode(state[name]).noted(encoded.note)
        small = small_leftovers(fixed, self.model, self.planner.fold_norms)
        return {name: coded[name] if name in coded else small[name] for name in self.source.entries}

    def bits(self, left: int) -> float:
        """Bits a weight that so many bytes allow; more than a code may have are of no use."""
        return min(8 * left / self._numel(), MAX_STORED_BITS)

    def empty(self) -> dict[str, Encoded]:
        """The tensors of the smallest file there is: what is kept, and every weight zero."""
        return self._tensors({name: zero_of(self.source.entries[name]) for name in self.coded}, None)

    def overhead(self, max_bytes: int) -> int:
        """What everything but codes takes; an error where a file without a single code would be too large."""
        zeros = [zero_of(self.source.entries[name]) for name in self.coded]
        return overhead_of(file_bytes(self.empty(), self.source.aliases), max_bytes, zeros)

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

    def _metric(self, name: str) -> LayerMoments | None:
        return self.metric.get(name) if self.planner.second_order else None

    def _moments(self, name: str, compressed: nn.Module | None) -> LayerMoments | None:
        module = self.module_of.get(name)
        if module is None or self.calibration is None or self.model is None:
            return None
        other = compressed if self.planner.sequential else None
        return self.calibration.moments([module], self.model, other)[module]

    def _order(self) -> list[str]:
        """What does not run or whose inputs are unknown, then execution order."""
        return [*(name for name in self.coded if name not in self.module_of), *self.module_of]

    def _numel(self) -> int:
        return sum(self.source.entries[name].numel for name in self.coded)


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """A weight that has its codes; `posed` and `moments` are kept only for the one that closes the gap."""

    encoded: Encoded
    step: float
    posed: Posed | None
    moments: LayerMoments | None


def overhead_of(least: int, max_bytes: int, empty: Iterable[Encoded]) -> int:
    """Of a file that has `least` bytes with every weight zero, what everything but codes takes."""
    if least > max_bytes:
        raise PlanError(
            f"{max_bytes} bytes cannot be met: with every weight zero the file would still have {least}, "
            "for what is kept, headers and the reader's safety margin of a byte for 1,024 numbers"
        )
    return least - sum(-(-encoded.numel // EXPANSION) for encoded in empty)


def zero_of(entry: Entry) -> Encoded:
    return Encoded("constant", entry.shape, entry.dtype, {"value": torch.zeros(1, dtype=entry.dtype)})


def closer_of(planned: Mapping[str, float], order: Sequence[str]) -> str:
    """The last weight with a fair share of the bytes: changing it late disturbs least."""
    enough = 0.04 * sum(planned.values())
    return next(
        (name for name in reversed(order) if planned[name] >= enough), max(planned, key=lambda n: planned[n])
    )


def is_fixed(choice: Choice) -> bool:
    """Whether a tensor is no weight, or the caller decided on it: a budget does not touch it."""
    return bool(choice.note) or isinstance(choice.method, Keep)


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


def _tables(
    model: nn.Module, calibration: Calibration, coded: Sequence[str], aliases: Mapping[str, str]
) -> dict[str, list[str]]:
    """Weights of embeddings that run: name -> its embedding, then the heads that are tied to it."""
    found: dict[str, list[str]] = {}
    for layer in calibration.order:
        name = aliases.get(weight_of(layer), weight_of(layer))
        module = model.get_submodule(layer)
        if name in coded and isinstance(module, nn.Embedding):
            found.setdefault(name, [layer])
        elif name in found and isinstance(module, nn.Linear):
            found[name].append(layer)
    return found


def _moment_bytes(shape: tuple[int, ...]) -> int:
    inputs = torch.Size(shape[1:]).numel()
    return 4 * inputs * inputs * (shape[0] if len(shape) > 2 and shape[1] == 1 else 1)
