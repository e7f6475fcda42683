"""Weights coded at given steps, or at about given bytes: one by one, or those of one shape together.

A small weight keeps a GPU busy for less time than it takes to ask for the work. There, weights of one shape are
prepared, rounded and counted together. A CPU gains nothing by it, and alone each sum is the same whoever else is
coded, so that a run that is resumed ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from factorpack.budget.step_search import StepSearch
from factorpack.format.streams import split_of, states_of
from factorpack.methods import SecondOrder
from factorpack.methods.second_order import encode_each_at
from factorpack.quantize.trellis import SHORTEST
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.code_size import estimate_bytes
from factorpack.weight import Weight

ALONE = frozenset({"cpu"})
"""Types of devices on which nothing is gained by working on several weights at once."""
TOGETHER = 1 << 24
"""Elements of weights and their inputs' moments that are worked on at once."""
TRIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A weight's codes, and the step that was tried."""

    encoded: Encoded
    step: float
    """As the search for it knows it: that of the codes is never finer than 16 bits allow."""
    bytes: int
    """Estimated, in the file."""


@dataclass(frozen=True, slots=True, eq=False)
class Aim:
    """A weight to be coded at about `bytes`, from the method's step on, at which `planned` bytes are expected."""

    weight: Weight
    method: SecondOrder
    planned: float
    bytes: float


def works_together(device: torch.device) -> bool:
    """Whether several weights at once are faster than one after the other."""
    return device.type not in ALONE


def at_once(shape: Sequence[int]) -> int:
    """How many weights of a shape take no more memory than the largest weight may."""
    inputs = torch.Size(shape[1:]).numel()
    return max(1, TOGETHER // (torch.Size(shape).numel() + inputs**2))


def prepare_together(weights: Sequence[Weight], ways: Sequence[Sequence[SecondOrder]]) -> None:
    """Prepares weights of one shape to be rounded, each by several methods, where that is faster at once."""
    if len(weights) < 2 or not works_together(_device_of(weights[0])):
        return
    users: dict[SecondOrder, list[Weight]] = {}
    for weight, methods in zip(weights, ways, strict=True):
        for method in methods:
            users.setdefault(_without_step(method), []).append(weight)
    for method, some in users.items():
        method.prepare_together(some)


def encode_with_steps(
    weights: Sequence[Weight], methods: Sequence[SecondOrder], steps: Sequence[float]
) -> list[Encoded]:
    """Each weight at its step, or at the finest that 16-bit codes allow."""
    by_shape: dict[Hashable, list[int]] = {}
    for place, (weight, method) in enumerate(zip(weights, methods, strict=True)):
        alike = (weight.shape, _without_step(method)) if _can_join(weight, method) else place
        by_shape.setdefault(alike, []).append(place)
    found: dict[int, Encoded] = {}
    for places in by_shape.values():
        most = at_once(weights[places[0]].shape)
        for some in (places[start : start + most] for start in range(0, len(places), most)):
            coded = _encode_alike(
                [weights[place] for place in some],
                [methods[place] for place in some],
                [steps[place] for place in some],
            )
            found |= zip(some, coded, strict=True)
    return [found[place] for place in range(len(weights))]


def _without_step(method: SecondOrder) -> SecondOrder:
    return replace(method, step=1.0)


def _can_join(weight: Weight, method: SecondOrder) -> bool:
    """Whether the weight may be rounded with others: rows of own steps may not, nor where codes are compared."""
    divides = weight.filter_size % method.tile == 0
    alike = weight.inputs is not None and weight.row_weights is None
    decided = not method.trellis or (weight.layout.outputs >= SHORTEST and not method.try_plain)
    return alike and decided and divides and works_together(_device_of(weight))


def _device_of(weight: Weight) -> torch.device:
    """Where a weight is rounded: beside the moments of its inputs, if they are known."""
    inputs = weight.inputs
    return inputs.second.device if isinstance(inputs, LayerMoments) else weight.values.device


def _encode_alike(
    weights: Sequence[Weight], methods: Sequence[SecondOrder], steps: Sequence[float]
) -> list[Encoded]:
    prepare_together(weights, [[method] for method in methods])
    finest = [finest_step(weight, method) for weight, method in zip(weights, methods, strict=True)]
    steps = [max(each) for each in zip(steps, finest, strict=True)]
    problems = [method.problem(weight) for weight, method in zip(weights, methods, strict=True)]
    if len(weights) == 1 or len(problems[0].latent) > 1:
        each_at = zip(weights, methods, steps, strict=True)
        return [replace(method, step=step).encode(weight) for weight, method, step in each_at]
    return encode_each_at(problems, steps, weights, methods[0].price, methods[0].trellis)


def encode_with_step(weight: Weight, method: SecondOrder, step: float) -> Coded:
    """The weight at a step, with its size."""
    (encoded,) = encode_with_steps([weight], [method], [step])
    return Coded(encoded, step, *estimated_bytes([encoded]))


def estimated_bytes(encoded: Sequence[Encoded]) -> list[int]:
    """About the bytes of weights in the file, alike in kind and shape, without rows in the schema: code_size.py."""
    first, totals = encoded[0], [0.0] * len(encoded)
    for name, part in first.parts.items():
        parts = [each.parts[name] for each in encoded]
        if name in first.bits:
            split = split_of(first, name)
            matrices = torch.stack([each.T.reshape(split, -1) if split else each for each in parts])
            sizes = estimate_bytes(matrices.float(), states_of(first, name)).tolist()
        else:
            sizes = [part.numel() * each.dtype.itemsize for each in parts]
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
    return [int(total) for total in totals]


def meet_bytes(weight: Weight, method: SecondOrder, aim: float, within: float = 0.01) -> Coded:
    """The weight at about `aim` bytes, which are expected at the method's step."""
    return meet_together([Aim(weight, method, aim, aim)], within)[0]


def meet_together(aims: Sequence[Aim], within: float) -> list[Coded]:
    """Weights at about the bytes that are aimed at; those that miss them are coded again, a few times."""
    searches = [StepSearch(aim.weight.numel) for aim in aims]
    steps = {
        place: _step_of(aim.method) * search.factor(aim.planned, aim.bytes)
        for place, (aim, search) in enumerate(zip(aims, searches, strict=True))
    }
    found: dict[int, Coded] = {}
    for _ in range(TRIES):
        for place, coded in _try_steps(aims, steps):
            found[place], aim = coded, aims[place].bytes
            step = steps.pop(place)
            if abs(coded.bytes - aim) > within * aim + 32:
                steps[place] = searches[place].next_after(step, coded.bytes, aim)
        if not steps:
            break
    return [found[place] for place in range(len(aims))]


def _try_steps(aims: Sequence[Aim], steps: Mapping[int, float]) -> list[tuple[int, Coded]]:
    """Some of the weights at their steps, which may be of one shape or not."""
    some = [aims[place] for place in steps]
    tried = list(steps.values())
    encoded = encode_with_steps([aim.weight for aim in some], [aim.method for aim in some], tried)
    alike: dict[Hashable, list[int]] = {}
    for place, each in enumerate(encoded):
        shapes = tuple(part.shape for part in each.parts.values())
        alike.setdefault((each.kind, shapes, each.trellis), []).append(place)
    sizes = {
        place: size
        for places in alike.values()
        for place, size in zip(places, estimated_bytes([encoded[place] for place in places]), strict=True)
    }
    return [
        (place, Coded(encoded[index], step, sizes[index]))
        for index, (place, step) in enumerate(steps.items())
    ]


def _step_of(method: SecondOrder) -> float:
    assert method.step is not None
    return method.step


def finest_step(weight: Weight, method: SecondOrder) -> float:
    """Finer steps would need more than the 16 bits of a code, the growth of feedback allowed for."""
    return method.problem(weight).largest * 2.0 ** (-12 if method.trellis else -14)
