"""Ways to code one weight: its basis and trellis by rate and distortion, its curve, its step for a size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch

from factorpack.budget.curves import Curve
from factorpack.budget.planner import Planner
from factorpack.budget.step_search import StepSearch
from factorpack.format.streams import coded_bytes
from factorpack.methods import SecondOrder
from factorpack.methods.second_order import as_encoded, stored_step
from factorpack.quantize.trellis import SHORTEST
from factorpack.record import Encoded
from factorpack.weight import Weight

LARGE_TILES = (16, 256)
"""Tiles tried beside none and the kernel: a small one, and the paper's."""
OCTAVES = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
GAUSSIAN_BITS = 2.05
"""Entropy of a Gaussian rounded at a step of its own standard deviation, for fine steps: log2 sqrt(2 pi e)."""
VALUES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A weight's codes, the method that made them, and the step that was tried."""

    encoded: Encoded
    method: SecondOrder
    step: float
    """As the search for it knows it: the method's own is never finer than 16-bit codes allow."""
    bytes: int
    """Estimated, in the file."""


def encode_with_step(weight: Weight, method: SecondOrder, step: float) -> Coded:
    """The weight at a step, or at the finest that 16-bit codes allow."""
    method = replace(method, step=max(step, _finest_step(weight, method)))
    encoded = method.encode(weight)
    return Coded(encoded, method, step, coded_bytes(encoded))


def encode_steps(weight: Weight, method: SecondOrder, steps: list[float]) -> list[tuple[Encoded, float]]:
    """The weight's codes at several steps, and the loss of each, as many at once as memory allows."""
    at_once = max(1, VALUES_AT_ONCE // method.problem(weight).latent.numel())
    found: list[tuple[Encoded, float]] = []
    for start in range(0, len(steps), at_once):
        found += _encode_batch(weight, method, steps[start : start + at_once])
    return found


def _encode_batch(weight: Weight, method: SecondOrder, steps: list[float]) -> list[tuple[Encoded, float]]:
    problem, finest = method.problem(weight), _finest_step(weight, method)
    device = problem.latent.device
    stored = [stored_step(max(step, finest), method.trellis, device) for step in steps]
    exact = torch.tensor([float(step) for step in stored], device=device)
    codes, errors = problem.round(exact, method.price, method.trellis)
    if weight.sensitivity is None:
        losses = errors / problem.latent.square().sum().clamp_min(1e-30)
    else:
        losses = errors * (weight.sensitivity / 2)
    return [
        (as_encoded(code, step, problem.basis, weight, method.trellis), float(loss))
        for code, step, loss in zip(codes, stored, losses, strict=True)
    ]


def choose_method(weight: Weight, planner: Planner, bits: float) -> SecondOrder:
    """The basis with the least loss + slope * bytes near `bits` per weight, C counted; then trellis or not.

    Its step means nothing yet.
    """
    methods = [planner.method(tile=tile) for tile in (_tiles(weight) if planner.basis else [1])]
    reference = middle_step(weight, methods[0], bits) / step_at_unit_slope(weight, methods[0])
    # On curves of equal slope a bit is worth this much loss.
    slope = planner.price * reference**2
    slope *= 0.5 if weight.sensitivity is not None else 1.0 / weight.numel

    def cost(method: SecondOrder) -> float:
        ((encoded, loss),) = encode_steps(weight, method, [reference * step_at_unit_slope(weight, method)])
        return loss + slope * 8 * coded_bytes(encoded)

    best = min(methods, key=cost)
    weight.forget((best.tile, best.damping))
    if not planner.trellis or weight.layout.outputs < SHORTEST:
        return best
    return min(best, replace(best, trellis=planner.trellis), key=cost)


def curve_of(weight: Weight, method: SecondOrder, bits: float) -> tuple[Curve, list[Encoded]]:
    """Seven octaves of steps about `bits` per weight, and one at which every code is zero; and the codes."""
    middle = middle_step(weight, method, bits)
    steps = [middle * 2.0**octave for octave in OCTAVES]
    steps.append(max(2.0 * steps[-1], 4.0 * float(method.problem(weight).latent.abs().max())))
    found = encode_steps(weight, method, steps)
    predicted = Curve(
        steps,
        [coded_bytes(encoded) for encoded, _ in found],
        [loss for _, loss in found],
        weight.numel,
        method.tile,
        step_at_unit_slope(weight, method),
        method.trellis,
    )
    return predicted, [encoded for encoded, _ in found]


def meet_bytes(weight: Weight, method: SecondOrder, step: float, aim: float) -> Coded:
    """The weight at about `aim` bytes, searching from `step`."""
    search = StepSearch(weight.numel)
    for _ in range(4):
        coded = encode_with_step(weight, method, step)
        if abs(coded.bytes - aim) <= 0.01 * aim + 32:
            break
        step = search.next_after(step, coded.bytes, aim)
    return coded


def middle_step(weight: Weight, method: SecondOrder, bits: float) -> float:
    """The step at which a Gaussian of the latent's RMS takes `bits` per value."""
    rms = float(method.problem(weight).latent.square().mean().sqrt())
    return max(rms, 1e-30) * float(2.0 ** (GAUSSIAN_BITS - max(bits, 0.5)))


def step_at_unit_slope(weight: Weight, method: SecondOrder) -> float:
    """Loss is half a sum over codes of a importance step^2 / 12: equal where step ~ (a importance)^-1/2.

    Without data every weight matters as much as its energy: the step is relative to it.
    """
    problem = method.problem(weight)
    if weight.sensitivity is None:
        return float(problem.latent.square().mean().sqrt().clamp_min(1e-30))
    return 1.0 / sqrt(max(weight.sensitivity * float(problem.importance().mean()), 1e-30))


def _finest_step(weight: Weight, method: SecondOrder) -> float:
    """Finer steps would need more than the 16 bits of a code, the growth of feedback allowed for."""
    largest = float(method.problem(weight).latent.abs().max())
    return largest * 2.0 ** (-12 if method.trellis else -14)


def _tiles(weight: Weight) -> list[int]:
    kernel = weight.values[0, 0].numel() if weight.values.dim() > 2 else 1
    wanted = [1, kernel, *LARGE_TILES]
    # C must be cheap beside the codes, and a tile lie inside one filter.
    return [
        tile
        for tile in dict.fromkeys(wanted)
        if weight.filter_size % tile == 0 and (tile == 1 or tile * tile * 8 <= weight.numel)
    ]
