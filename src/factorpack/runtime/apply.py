"""Puts a packed model into the user's model: which layer holds what, and a report about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from factorpack.decoding import decode, decode_into
from factorpack.errors import PlanError
from factorpack.kinds import KINDS
from factorpack.record import Encoded, weight_of
from factorpack.runtime.choose import choose
from factorpack.runtime.factored import FACTORED, why_not_factored
from factorpack.runtime.packed_layers import PACKED, PackedLayer, hold_packed
from factorpack.runtime.packed_weight import PackedWeight
from factorpack.runtime.timing import time_layers

Mode = Literal["dense", "packed", "factored", "auto"]
MODES: tuple[str, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What became of one coded weight."""

    name: str
    mode: str
    note: str = ""
    """Why it does not have the requested mode, where it does not."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What "auto" measured, by mode, summed over all runs of the layer on the example."""

    def __str__(self) -> str:
        times = ", ".join(f"{mode} {1e3 * seconds:.2f} ms" for mode, seconds in self.seconds.items())
        return "; ".join(filter(None, (f"{self.name}: {self.mode}", times, self.note)))


@dataclass(frozen=True, slots=True)
class Applied:
    """A model that runs on a packed file, and how each of its coded weights is held."""

    model: nn.Module
    layers: tuple[LayerReport, ...]

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.model)

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A layer that could hold its weight packed, and the classes it could then have."""

    name: str
    layer: nn.Module
    weight: PackedWeight
    classes: Mapping[str, type[PackedLayer]]
    note: str
    """Why it is not factored, where that was requested."""


def apply(
    model: nn.Module,
    tensors: Iterable[tuple[str, Encoded]],
    aliases: Mapping[str, str],
    mode: str,
    run_example: Callable[[], object] | None,
    slack: float,
) -> Applied:
    """Fills a model whose names and shapes fit `tensors`, and converts its layers as `mode` says."""
    if mode not in MODES:
        raise PlanError(f"mode {mode!r}, known are {', '.join(MODES)}")
    if mode == "auto" and run_example is None:
        raise PlanError("mode 'auto' measures: give it an example batch")
    if not 0 <= slack < float("inf"):
        raise PlanError(f"slack is {slack}, allowed are 0 and more: shares of the dense layers' time")
    targets = model.state_dict(keep_vars=True)
    holders = _holders(model) if mode != "dense" else {}
    candidates: list[Candidate] = []
    reports: list[LayerReport] = []
    for target, encoded in tensors:
        names = [target, *(alias for alias, tied in aliases.items() if tied == target)]
        is_coded = KINDS[encoded.kind].is_coded
        held = [name for name in names if name in holders] if is_coded else []
        candidates += _candidates({name: holders[name] for name in held}, encoded, mode)
        plain = names if mode == "auto" else [name for name in names if name not in held]
        _fill({id(targets[name]): targets[name] for name in plain}.values(), encoded)
        if is_coded and not held:
            note = "" if mode == "dense" else "no layer of a class that can be packed holds it"
            reports.append(LayerReport(target, "dense", note))
    return Applied(model, (*_settle(candidates, mode, run_example, slack), *reports))


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each tensor once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def _holders(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can be packed, under every name of their weight."""
    return {
        weight_of(name): module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) in PACKED
    }


def _candidates(layers: Mapping[str, nn.Module], encoded: Encoded, mode: str) -> Iterator[Candidate]:
    """One per layer; tied layers share the codes."""
    shared: PackedWeight | None = None
    seen: set[nn.Module] = set()
    for name, layer in layers.items():
        if layer in seen:
            continue
        seen.add(layer)
        assert isinstance(layer.weight, Tensor)
        shared = shared or PackedWeight(encoded, layer.weight)
        classes: dict[str, type[PackedLayer]] = {"packed": PACKED[type(layer)]}
        note = "" if mode == "packed" else why_not_factored(layer, encoded)
        if mode != "packed" and not note:
            classes["factored"] = FACTORED[type(layer)]
        yield Candidate(name, layer, shared, classes, note)


def _settle(
    candidates: list[Candidate], mode: str, run_example: Callable[[], object] | None, slack: float
) -> Iterator[LayerReport]:
    """Converts each candidate's layer as requested, or as the measurement chose."""
    measured: Mapping[nn.Module, Mapping[str, float]] = {}
    fitting: Mapping[nn.Module, str] = {}
    if mode == "auto" and run_example is not None:
        measured = time_layers({each.layer: (each.weight, each.classes) for each in candidates}, run_example)
        saved = {each.layer: _saved_bytes(each) for each in candidates}
        fitting = choose(measured, saved, slack)
    for each in candidates:
        seconds = measured.get(each.layer, {})
        chosen, note = mode, each.note
        if mode == "auto":
            chosen = fitting.get(each.layer, "dense")
            note = note if seconds else "it does not run on the example"
        elif mode not in each.classes:
            chosen = "packed"
        if chosen != "dense":
            hold_packed(each.layer, each.classes[chosen], each.weight)
        yield LayerReport(each.name, chosen, note, seconds)


def _saved_bytes(candidate: Candidate) -> int:
    weight = candidate.layer.weight
    assert isinstance(weight, Tensor)
    return weight.nbytes - resident_bytes(candidate.weight)


def _fill(targets: Iterable[Tensor], encoded: Encoded) -> None:
    """Decodes into tensors of a model: in place, unless they are on another device or not contiguous."""
    with torch.no_grad():
        for target in targets:
            if target.device.type == "cpu" and target.is_contiguous():
                decode_into(encoded, target)
            else:
                target.copy_(decode(encoded))
