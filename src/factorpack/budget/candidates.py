"""Ways to code one weight: its basis and trellis by rate and distortion, its curve, its step for a size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch

from factorpack.budget.curves import Curve
from factorpack.budget.planner import Planner
from factorpack.budget.step_search import StepSearch
from factorpack.format.streams import split_of, states_of
from factorpack.methods import SecondOrder
from factorpack.methods.second_order import stored_step
from factorpack.quantize.trellis import SHORTEST
from factorpack.record import Encoded
from factorpack.solve.code_size import estimate_bytes
from factorpack.solve.layer_problem import Basis
from factorpack.weight import Weight

TILES_WITHOUT_KERNEL = (16, 256)
"""Tiles tried beside none where there is no kernel to be one: a small one, and the paper's."""
WEIGHTS_PER_ENTRY = 4000
"""With as many weights for each entry of C, a basis over the kernel costs nothing and is not compared with none."""
OCTAVES = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
GAUSSIAN_BITS = 2.05
"""Entropy of a Gaussian rounded at a step of its own standard deviation, for fine steps: log2 sqrt(2 pi e)."""
VALUES_AT_ONCE = 1 << 24
PLANNED_VALUES = 1 << 19
"""Values of a weight that plans are made on: rows are alike, so a large weight needs only some of them."""


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
    return Coded(encoded, method, step, estimated_bytes(encoded))


def estimated_bytes(encoded: Encoded) -> int:
    """About a weight's bytes in the file, without its row in the schema: see solve/code_size.py."""
    total = 0.0
    for name, part in encoded.parts.items():
        if name not in encoded.bits:
            total += part.numel() * part.dtype.itemsize
            continue
        split = split_of(encoded, name)
        matrix = part.T.reshape(split, -1) if split else part
        total += estimate_bytes(matrix[None].float(), states_of(encoded, name)).item()
    return int(total)


def measure_steps(weight: Weight, method: SecondOrder, steps: list[float]) -> list[tuple[float, float]]:
    """Bytes and loss of the weight at several steps, from some of its rows, as many at once as memory allows.

    The loss is in nats, by the sensitivity; without one it is the relative squared error of the weight.
    """
    problem, finest = method.problem(weight), _finest_step(weight, method)
    some = problem.some_rows(PLANNED_VALUES)
    rows = problem.latent.shape[1]
    stored = [stored_step(max(step, finest), method.trellis, problem.latent.device).float() for step in steps]
    at_once = max(1, VALUES_AT_ONCE // some.latent.numel())
    found: list[tuple[float, float]] = []
    for start in range(0, len(steps), at_once):
        batch = torch.cat(stored[start : start + at_once]).flatten()
        codes, errors = some.round(batch, method.price, method.trellis)
        sizes = _bytes_of(codes, problem.basis, method.trellis, rows)
        losses = errors * (rows / some.latent.shape[1] * _loss_per_error(weight, method))
        found += zip(sizes.tolist(), losses.tolist(), strict=True)
    return found


def _bytes_of(codes: torch.Tensor, basis: Basis | None, trellis: int, rows: int) -> torch.Tensor:
    """Bytes, (steps,), of codes (steps, groups, some of the `rows`, K), with the basis and the step."""
    size = estimate_bytes(codes.flatten(1, 2), trellis, rows * codes.shape[1]) + 4
    return size if basis is None else size + estimate_bytes(basis.codes.float()[None]) + 4


def _loss_per_error(weight: Weight, method: SecondOrder) -> float:
    if weight.sensitivity is not None:
        return weight.sensitivity / 2
    problem = method.problem(weight)
    return 1.0 / max(problem.rms**2 * problem.latent.numel(), 1e-30)


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
        ((size, loss),) = measure_steps(weight, method, [reference * step_at_unit_slope(weight, method)])
        return loss + slope * 8 * size

    best = min(methods, key=cost) if len(methods) > 1 else methods[0]
    weight.forget((best.tile, best.damping))
    if not planner.trellis or weight.layout.outputs < SHORTEST:
        return best
    return min(best, replace(best, trellis=planner.trellis), key=cost)


def curve_of(weight: Weight, method: SecondOrder, bits: float) -> Curve:
    """Seven octaves of steps about `bits` per weight, and one at which every code is zero."""
    middle = middle_step(weight, method, bits)
    steps = [middle * 2.0**octave for octave in OCTAVES]
    steps.append(max(2.0 * steps[-1], 4.0 * method.problem(weight).largest))
    found = measure_steps(weight, method, steps)
    return Curve(
        steps,
        [int(size) for size, _ in found],
        [loss for _, loss in found],
        weight.numel,
        method.tile,
        step_at_unit_slope(weight, method),
        method.trellis,
    )


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
    return max(method.problem(weight).rms, 1e-30) * float(2.0 ** (GAUSSIAN_BITS - max(bits, 0.5)))


def step_at_unit_slope(weight: Weight, method: SecondOrder) -> float:
    """Loss is half a sum over codes of a importance step^2 / 12: equal where step ~ (a importance)^-1/2.

    Without data every weight matters as much as its energy: the step is relative to it.
    """
    problem = method.problem(weight)
    if weight.sensitivity is None:
        return max(problem.rms, 1e-30)
    return 1.0 / sqrt(max(weight.sensitivity * problem.mean_importance, 1e-30))


def _finest_step(weight: Weight, method: SecondOrder) -> float:
    """Finer steps would need more than the 16 bits of a code, the growth of feedback allowed for."""
    return method.problem(weight).largest * 2.0 ** (-12 if method.trellis else -14)


def _tiles(weight: Weight) -> list[int]:
    kernel = weight.values[0, 0].numel() if weight.values.dim() > 2 else 1
    if kernel**2 * WEIGHTS_PER_ENTRY <= weight.numel and kernel > 1:
        return [kernel]
    wanted = [1, kernel] if kernel > 1 else [1, *TILES_WITHOUT_KERNEL]
    # C must be cheap beside the codes, and a tile lie inside one filter.
    return [
        tile
        for tile in wanted
        if weight.filter_size % tile == 0 and (tile == 1 or tile * tile * 8 <= weight.numel)
    ]
