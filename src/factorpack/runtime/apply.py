"""Puts a packed model into the user's model: which layer holds what, and a report about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor, nn

from factorpack.errors import PlanError
from factorpack.format.tensor_source import TensorSource
from factorpack.kinds import KINDS
from factorpack.record import weight_of
from factorpack.runtime.candidates import Candidate, Makers
from factorpack.runtime.choose import choose
from factorpack.runtime.fill import Filler, Place, on_cpu
from factorpack.runtime.forms import FormBytes, fit_forms, shrink
from factorpack.runtime.packed_layers import PACKED, hold_packed
from factorpack.runtime.packed_weight import packed_bytes
from factorpack.runtime.timing import time_layers

Mode = Literal["dense", "packed", "coded", "factored", "auto"]
MODES: tuple[str, ...] = get_args(Mode)
GPU_SHARE = 1.1
"""What codes in lanes take of their stream's bytes, at most."""


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


@dataclass(frozen=True, slots=True)
class Request:
    """How a model is to run."""

    mode: str
    run_example: Callable[[], object] | None = None
    slack: float = 0.0
    max_memory: int | None = None
    """What the model may hold, `resident_bytes`; a layer that runs has its weight in addition."""
    place: Place = on_cpu
    """Where tensors go that are on the meta device."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"mode {self.mode!r}, known are {', '.join(MODES)}")
        if self.mode == "auto" and self.run_example is None:
            raise PlanError("mode 'auto' measures: give it an example batch")
        if not 0 <= self.slack < float("inf"):
            raise PlanError(
                f"slack is {self.slack}, allowed are 0 and more: shares of the dense layers' time"
            )
        if self.max_memory is not None and self.mode not in ("packed", "auto"):
            raise PlanError(f"max_memory is for modes 'packed' and 'auto', and the mode is {self.mode!r}")


def apply(model: nn.Module, tensors: TensorSource, aliases: Mapping[str, str], request: Request) -> Applied:
    """Fills a model whose names and shapes fit `tensors`, and converts its layers as `request` says."""
    filler = Filler(model, request.place)
    names = {target: [target] for target in tensors}
    for alias, target in aliases.items():
        names[target].append(alias)
    holders = _holders(model) if request.mode != "dense" else {}
    held = {
        target: {name: holders[name] for name in own if name in holders}
        for target, own in names.items()
        if KINDS[tensors.kind(target)].is_coded
    }
    forms = _forms(model, tensors, held, request, filler)
    streamed = {name for name, form in forms.items() if form == "coded" and filler.like(name).is_cpu}
    plain = {
        target: own if request.mode == "auto" else [name for name in own if name not in held.get(target, {})]
        for target, own in names.items()
    }
    makers = Makers(tensors, filler, request.mode, request.max_memory is not None, forms, plain)
    made = makers.ahead([name for name in names if name not in streamed])
    candidates: list[Candidate] = []
    for target in names:
        layers = held.get(target, {})
        if target in streamed:
            candidates += makers.streamed(target, layers)
            continue
        encoded, weight = next(made)
        if weight is not None:
            candidates += makers.packed(target, layers, encoded, weight)
        if encoded is not None:
            filler.fill(plain[target], encoded)
    note = "" if request.mode == "dense" else "no layer of a class that can be packed holds it"
    others = (LayerReport(target, "dense", note) for target, layers in held.items() if not layers)
    return Applied(model, (*_settle(model, candidates, request), *others))


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


def _forms(
    model: nn.Module,
    tensors: TensorSource,
    held: Mapping[str, Mapping[str, nn.Module]],
    request: Request,
    filler: Filler,
) -> dict[str, str]:
    """The form of each weight that a layer holds: "packed", "coded", or empty where nothing decides."""
    owned = {target: layers for target, layers in held.items() if layers}
    if request.mode == "coded":
        return dict.fromkeys(owned, "coded")
    if request.mode != "packed" or request.max_memory is None:
        return dict.fromkeys(owned, "")
    sizes: dict[str, FormBytes] = {}
    for target, layers in owned.items():
        weight, coded = _weight(next(iter(layers.values()))), tensors.stored_bytes(target)
        if not filler.like(target).is_cpu:
            coded = int(GPU_SHARE * coded)
        is_table = all(isinstance(layer, nn.Embedding) for layer in layers.values())
        fixed = packed_bytes(tuple(weight.shape), tensors.specs(target))
        sizes[target] = FormBytes(weight.numel(), fixed, coded, is_table)
    layers_held = [layer for layers in owned.values() for layer in layers.values()]
    return fit_forms(sizes, request.max_memory, _other_bytes(model, layers_held))


def _other_bytes(model: nn.Module, layers: Iterable[nn.Module]) -> int:
    """What a model holds besides the weights of these layers."""
    weights = {id(_weight(layer)): _weight(layer).nbytes for layer in layers}
    return resident_bytes(model) - sum(weights.values())


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _settle(model: nn.Module, candidates: list[Candidate], request: Request) -> Iterator[LayerReport]:
    """Converts each candidate's layer as requested, or as the measurement chose."""
    measured: Mapping[nn.Module, Mapping[str, float]] = {}
    chosen: Mapping[nn.Module, str] = {}
    if request.mode == "auto" and request.run_example is not None:
        measured = time_layers({each.layer: each.ways for each in candidates}, request.run_example)
        chosen = _chosen(model, candidates, measured, request)
    for each in candidates:
        seconds = measured.get(each.layer, {})
        way, note = request.mode, each.note
        if request.mode == "auto":
            way = chosen.get(each.layer, "dense")
            note = note if seconds else "it does not run on the example"
        elif way not in each.ways:
            way = next(iter(each.ways))
        if way != "dense":
            hold_packed(each.layer, *each.ways[way])
        yield LayerReport(each.name, way, note, seconds)


def _chosen(
    model: nn.Module,
    candidates: list[Candidate],
    measured: Mapping[nn.Module, Mapping[str, float]],
    request: Request,
) -> Mapping[nn.Module, str]:
    sizes = {
        each.layer: {"dense": _weight(each.layer).nbytes}
        | {way: resident_bytes(weight) for way, (_, weight) in each.ways.items()}
        for each in candidates
    }
    saved = {layer: own["dense"] - own["packed"] for layer, own in sizes.items()}
    fast = {layer: {way: times[way] for way in times if way != "coded"} for layer, times in measured.items()}
    chosen = choose(fast, saved, request.slack)
    if request.max_memory is None:
        return chosen
    others = _other_bytes(model, [each.layer for each in candidates])
    everywhere = {layer: chosen.get(layer, "dense") for layer in sizes}
    return shrink(everywhere, measured, sizes, request.max_memory, others)
