"""A model's forward pass in segments: stopped at the output of a module, and continued from it later.

The model's own code runs each time, so masks, position embeddings and keyword arguments are its own. Modules
that are done with are replaced for that call by stubs that cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import StopForward, hooked, run


@dataclass(frozen=True, slots=True)
class Form:
    """What a module returns, without the values: a tensor, or a tuple whose first element is the only tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    rest: tuple[Any, ...] | None = None
    """The other elements of a tuple: None or ()."""

    def wrap(self, tensor: Tensor) -> Any:
        return tensor if self.rest is None else (tensor, *self.rest)

    def blank(self) -> Any:
        """An output nobody reads: memory is reserved, as in-place work needs it, but not written."""
        return self.wrap(torch.empty(self.shape, dtype=self.dtype, device=self.device))


def form_of(output: Any) -> Form | None:
    """The form of a module's output; None where a stub could not return the like."""
    rest = None
    if type(output) is tuple and output and all(each is None or each == () for each in output[1:]):
        output, rest = output[0], output[1:]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None
    return Form(output.shape, output.dtype, output.device, rest)


def tensor_in(output: Any) -> Tensor:
    """The tensor of an output that has a form."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor.detach()


@dataclass(frozen=True, slots=True)
class Cut:
    """A module whose output is all that later computation needs."""

    module: str
    skipped: tuple[str, ...]
    """Modules that finish before it and need not run where a pass starts from its output."""


@dataclass(frozen=True)
class Segments:
    """Where a model is cut, and which of its layers run between two cuts. Segment 0 starts at the inputs."""

    cuts: tuple[Cut, ...] = ()
    segment_of: Mapping[str, int] = field(default_factory=dict)
    """Layers with a weight, in execution order -> the segment in which they first run."""
    same_input: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layers that run once -> those that get the very same tensor, itself included, in execution order."""

    def __len__(self) -> int:
        return len(self.cuts) + 1

    @cached_property
    def skippable(self) -> frozenset[str]:
        return frozenset(name for cut in self.cuts for name in (*cut.skipped, cut.module))


Forms = dict[str, Form]
"""The forms of skippable modules' outputs on one batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Border:
    """How far a network has run on a batch: the segment that comes next, and the activation it starts from."""

    place: int = 0
    value: Tensor | None = None
    """None at the model's inputs."""

    @property
    def bytes(self) -> int:
        return 0 if self.value is None else self.value.nbytes

    def joined(self, other: Border) -> Border:
        """The samples of both, which have run as far."""
        assert self.value is not None
        assert other.value is not None
        return Border(self.place, torch.cat([self.value, other.value]))


INPUTS = Border()


def run_on(model: nn.Module, batch: Any, segments: Segments, start: Border, forms: Forms) -> Any:
    """Runs a model from a border: its output, or None where a hook stopped it."""
    with starting_from(model, segments, start, forms):
        return run(model, batch)


def starting_from(
    model: nn.Module, segments: Segments, start: Border, forms: Forms
) -> AbstractContextManager[None]:
    """A model that starts from a border inside the block."""
    return stubbed(model, _stubs(segments, start, forms))


def run_to(
    model: nn.Module, batch: Any, segments: Segments, start: Border, forms: Forms, place: int
) -> Border:
    """Runs a model from a border to the start of a later segment; adds the forms it meets, unless they are known."""
    cut = segments.cuts[place - 1]
    if forms.keys() >= {*cut.skipped, cut.module}:
        return run_between(model, batch, segments, start, forms, place)
    with recording(model, segments, start, forms):
        return run_between(model, batch, segments, start, forms, place)


def run_between(
    model: nn.Module, batch: Any, segments: Segments, start: Border, forms: Forms, place: int
) -> Border:
    """The same where all forms are known."""
    found: list[Border] = []

    def stop(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found.append(Border(place, own(tensor_in(output))))
        raise StopForward

    with hooked(model, after={segments.cuts[place - 1].module: stop}):
        run_on(model, batch, segments, start, forms)
    return found[0]


def borders_of(model: nn.Module, batch: Any, segments: Segments, forms: Forms) -> tuple[Any, list[Border]]:
    """The model's output, and the borders of all segments but the first."""
    found: dict[int, Border] = {}

    def keep(place: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            found[place] = Border(place, tensor_in(output).clone())  # what follows may work in place

        return hook

    hooks = {cut.module: keep(place) for place, cut in enumerate(segments.cuts, 1)}
    with recording(model, segments, INPUTS, forms), hooked(model, after=hooks):
        output = run_on(model, batch, segments, INPUTS, forms)
    return output, [found[place] for place in sorted(found)]


@contextmanager
def recording(model: nn.Module, segments: Segments, start: Border, forms: Forms) -> Iterator[None]:
    """Adds the forms of the skippable modules that run in the block to `forms`."""

    def record(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            form = form_of(output)
            if form is not None:
                forms[name] = form

        return hook

    stubs = set(segments.cuts[start.place - 1].skipped) if start.place else set()
    with hooked(model, after={name: record(name) for name in segments.skippable - stubs}):
        yield


@contextmanager
def stubbed(model: nn.Module, stubs: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Some modules' forwards replaced inside the block."""
    modules = {name: model.get_submodule(name) for name in stubs}
    before = {name: module.__dict__.get("forward") for name, module in modules.items()}
    try:
        for name, stub in stubs.items():
            modules[name].forward = stub
        yield
    finally:
        for name, module in modules.items():
            module.__dict__.pop("forward", None)
            own_forward = before[name]
            if own_forward is not None:
                module.forward = own_forward


def _stubs(segments: Segments, start: Border, forms: Forms) -> dict[str, Callable[..., Any]]:
    if start.value is None:
        return {}
    value, cut = start.value, segments.cuts[start.place - 1]

    def blank(name: str) -> Callable[..., Any]:
        return lambda *_args, **_named: forms[name].blank()

    def continued(*_args: Any, **_named: Any) -> Any:
        form = forms[cut.module]
        # A copy, since what follows may work in place.
        return form.wrap(value.to(form.device, copy=True))

    return {name: blank(name) for name in cut.skipped} | {cut.module: continued}


def own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it is a small part of a large storage."""
    return tensor if tensor.untyped_storage().nbytes() <= 2 * tensor.nbytes else tensor.clone()
