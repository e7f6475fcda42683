"""What a model's layers could hold in place of their weights: read and made by threads in advance."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import nn

from factorpack.format.tensor_source import TensorSource
from factorpack.record import Encoded
from factorpack.runtime.coded_weight import CodedWeight
from factorpack.runtime.factored import FACTORED, why_not_factored
from factorpack.runtime.fill import Filler
from factorpack.runtime.packed_layers import PACKED, HeldWeight, PackedLayer
from factorpack.runtime.packed_weight import PackedWeight

WORTH_A_THREAD = 1 << 18
"""Elements of a tensor that is read by a thread."""
AT_A_TIME_ON_GPU = 2
"""Tensors that are made on a GPU at a time: what that takes there besides them is up to ten bytes per element."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A layer that could hold its weight packed, and the classes it could then have."""

    name: str
    layer: nn.Module
    ways: Mapping[str, tuple[type[PackedLayer], HeldWeight]]
    note: str
    """Why it is not factored, where that was requested."""


@dataclass(frozen=True, slots=True, eq=False)
class Makers:
    """What makes candidates: one per layer; tied layers share the codes."""

    tensors: TensorSource
    filler: Filler
    mode: str
    is_limited: bool
    """Whether there is a limit to the memory that the model takes."""
    forms: Mapping[str, str]
    """Of weights that layers hold packed."""
    plain: Mapping[str, list[str]]
    """Names under which a tensor is filled in."""
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_A_TIME_ON_GPU))

    def streamed(self, target: str, layers: Mapping[str, nn.Module]) -> Iterator[Candidate]:
        """Layers that hold their weight's own bytes."""
        shared = CodedWeight(*self.tensors.stream(target), self.filler.like(target))
        for name, layer in _unique(layers).items():
            yield Candidate(name, layer, {"coded": (PACKED[type(layer)], shared)}, "")

    def ahead(self, names: Sequence[str]) -> Iterator[tuple[Encoded | None, PackedWeight | None]]:
        """Every tensor, and its packed weight where it has a form: read and made by threads in advance.

        What is done with a tensor is not held. So the largest of those are begun first, and at most as many others
        are in advance as there are threads.
        """
        threads = torch.get_num_threads()
        if threads < 2:
            yield from map(self._made, names)
            return
        sizes = {
            name: sum(math.prod(spec.shape) for spec in self.tensors.specs(name).values()) for name in names
        }
        large = [name for name in names if name in self.forms or sizes[name] >= WORTH_A_THREAD]
        held = {name for name in large if self._is_held(name)}
        ahead = iter([name for name in large if name in held])
        with ThreadPoolExecutor(threads) as pool:
            started = {name: pool.submit(self._made, name) for name in islice(ahead, threads)}
            free = sorted((name for name in large if name not in held), key=lambda name: -sizes[name])
            started |= {name: pool.submit(self._made, name) for name in free}
            try:
                for name in names:
                    yield started.pop(name).result() if name in started else self._made(name)
                    if name in held:
                        started |= {each: pool.submit(self._made, each) for each in islice(ahead, 1)}
            finally:
                pool.shutdown(cancel_futures=True)

    def _is_held(self, name: str) -> bool:
        """Whether there is more to do with a tensor. On a CPU, torch fills one at a time with threads of its own."""
        is_asked_for = name in self.forms and self.mode in ("factored", "auto")
        return is_asked_for or any(self.filler.like(each).is_cpu for each in self.plain[name])

    def _made(self, name: str) -> tuple[Encoded | None, PackedWeight | None]:
        encoded, weight = self.tensors.read(name), None
        with nullcontext() if self.filler.like(name).is_cpu else self.turns:
            if name in self.forms:
                weight = PackedWeight(encoded, self.filler.like(name), self.forms[name])
            if self._is_held(name):
                return encoded, weight
            self.filler.fill(self.plain[name], encoded)
            return None, weight

    def packed(
        self, target: str, layers: Mapping[str, nn.Module], encoded: Encoded | None, weight: PackedWeight
    ) -> Iterator[Candidate]:
        """`encoded` is there in modes that choose."""
        mode, like = self.mode, self.filler.like(target)
        shared: dict[str, HeldWeight] = {self.forms[target] or "packed": weight}
        if mode == "auto" and self.is_limited and encoded is not None:
            shared["coded"] = (
                CodedWeight(*self.tensors.stream(target), like)
                if like.is_cpu
                else PackedWeight(encoded, like, "coded")
            )
        for name, layer in _unique(layers).items():
            ways: dict[str, tuple[type[PackedLayer], HeldWeight]] = {
                way: (PACKED[type(layer)], weight) for way, weight in shared.items()
            }
            note = ""
            if encoded is not None and mode in ("factored", "auto"):
                note = why_not_factored(layer, encoded)
                if not note:
                    ways["factored"] = FACTORED[type(layer)], shared["packed"]
            yield Candidate(name, layer, ways, note)


def _unique(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Each layer once, under its first name."""
    first: dict[nn.Module, str] = {}
    for name, layer in layers.items():
        first.setdefault(layer, name)
    return {name: layer for layer, name in first.items()}
