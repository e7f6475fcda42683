"""A weight posed for rounding: its basis chosen by rate and distortion, its curve, its size at a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from factorpack.budget.curves import Curve
from factorpack.budget.step_search import Search
from factorpack.format.streams import coded_bytes
from factorpack.methods.protocol import rows_of
from factorpack.methods.second_order import as_encoded, stored_step
from factorpack.quantize.trellis import SHORTEST
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.code_length import HIGH_RATE
from factorpack.solve.layer_problem import DAMPING, LayerProblem, build_problem, tile_basis
from factorpack.tiles import out_first_shape

LARGE_TILES = (16, 256)
"""Tiles tried beside none and the kernel: a small one, and the paper's."""
OCTAVES = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
GAUSSIAN_BITS = 2.05
"""Entropy of a Gaussian rounded at a step of its own standard deviation, for fine steps: log2 sqrt(2 pi e)."""
NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Rounding:
    """What every weight of a model is rounded by."""

    price: float = HIGH_RATE
    damping: float = DAMPING
    basis: bool = True
    trellis: int = 0
    """States of the trellis that codes are a path through where that pays; 0: none."""


@dataclass(frozen=True, slots=True, eq=False)
class Posed:
    """One weight with its problem; `sensitivity` is None where nothing is known of its outputs."""

    weight: Tensor
    transposed_groups: int
    problem: LayerProblem
    sensitivity: float | None
    rounding: Rounding

    @property
    def tile(self) -> int:
        return 1 if self.problem.basis is None else len(self.problem.basis.codes)

    def step_at_unit_slope(self) -> float:
        """Loss is half a sum over codes of a importance step^2 / 12: equal where step ~ (a importance)^-1/2.

        Without data every weight matters as much as its energy: the step is relative to it.
        """
        if self.sensitivity is None:
            return float(self.problem.latent.square().mean().sqrt().clamp_min(1e-30))
        importance = float(self.problem.importance().mean())
        return 1.0 / sqrt(max(self.sensitivity * importance, 1e-30))

    def at(self, steps: list[float]) -> list[tuple[Encoded, float]]:
        """The weight at some steps, and the loss each of them leaves."""
        many = max(1, NUMBERS_AT_ONCE // self.problem.latent.numel())
        found: list[tuple[Encoded, float]] = []
        for start in range(0, len(steps), many):
            found += self._at(steps[start : start + many])
        return found

    def _at(self, steps: list[float]) -> list[tuple[Encoded, float]]:
        device = self.problem.latent.device
        # Finer steps would need more than the 16 bits a code may have, feedback's growth allowed for.
        trellis = self.rounding.trellis
        finest = float(self.problem.latent.abs().max()) * 2.0 ** (-12 if trellis else -14)
        stored = [stored_step(max(step, finest), trellis, device) for step in steps]
        exact = torch.tensor([float(step) for step in stored], device=device)
        codes, errors = self.problem.round(exact, self.rounding.price, trellis)
        if self.sensitivity is None:
            losses = errors / self.problem.latent.square().sum().clamp_min(1e-30)
        else:
            losses = errors * (self.sensitivity / 2)
        like = (self.problem.basis, self.weight, self.transposed_groups, trellis)
        return [
            (as_encoded(code, step, *like), float(loss))
            for code, step, loss in zip(codes, stored, losses, strict=True)
        ]


def pose(
    weight: Tensor,
    transposed_groups: int,
    moments: LayerMoments | None,
    sensitivity: float | None,
    tile: int,
    rounding: Rounding,
) -> Posed:
    """A weight in the basis of a given tile; 1 is none."""
    rows = rows_of(weight, transposed_groups)
    basis = tile_basis(rows, tile, moments) if tile > 1 else None
    solved = build_problem(rows, moments, basis, rounding.damping)
    return Posed(weight, transposed_groups, solved, sensitivity, rounding)


def best_pose(
    weight: Tensor,
    transposed_groups: int,
    moments: LayerMoments | None,
    sensitivity: float | None,
    bits: float,
    rounding: Rounding,
) -> Posed:
    """The weight in the basis with the least loss + slope * bytes near `bits` a weight, C counted.

    Then, in that basis, along a trellis or not.
    """
    plain = replace(rounding, trellis=0)
    poses = [
        pose(weight, transposed_groups, moments, sensitivity, tile, plain)
        for tile in (_tiles(weight, transposed_groups) if rounding.basis else [1])
    ]
    reference = middle_step(poses[0], bits) / poses[0].step_at_unit_slope()
    # On curves of equal slope a bit is worth this much loss.
    slope = rounding.price * reference**2
    slope *= 0.5 if sensitivity is not None else 1.0 / weight.numel()

    def cost(posed: Posed) -> float:
        ((encoded, loss),) = posed.at([reference * posed.step_at_unit_slope()])
        return loss + slope * 8 * coded_bytes(encoded)

    best = min(poses, key=cost)
    rows = out_first_shape(tuple(weight.shape), transposed_groups)[0]
    if not rounding.trellis or rows < SHORTEST:
        return best
    return min(best, replace(best, rounding=rounding), key=cost)


def curve(posed: Posed, bits: float) -> tuple[Curve, list[Encoded]]:
    """Seven octaves of steps about `bits` a weight, and one at which nothing but zeros is left; and its codes."""
    middle = middle_step(posed, bits)
    steps = [middle * 2.0**octave for octave in OCTAVES]
    steps.append(max(2.0 * steps[-1], 4.0 * float(posed.problem.latent.abs().max())))
    found = posed.at(steps)
    predicted = Curve(
        steps,
        [coded_bytes(encoded) for encoded, _ in found],
        [loss for _, loss in found],
        posed.weight.numel(),
        posed.tile,
        posed.step_at_unit_slope(),
        posed.rounding.trellis,
    )
    return predicted, [encoded for encoded, _ in found]


def meet(posed: Posed, step: float, aim: float) -> tuple[float, Encoded]:
    """The step near `step` at which a weight takes about `aim` bytes, and its codes there."""
    search = Search(posed.weight.numel())
    for _ in range(4):
        encoded = posed.at([step])[0][0]
        size = coded_bytes(encoded)
        if abs(size - aim) <= 0.01 * aim + 32:
            break
        tried, step = step, search.after(step, size, aim)
    else:
        return tried, encoded
    return step, encoded


def middle_step(posed: Posed, bits: float) -> float:
    """The step at which a Gaussian of the latent's spread takes `bits` a number."""
    spread = float(posed.problem.latent.square().mean().sqrt())
    return max(spread, 1e-30) * float(2.0 ** (GAUSSIAN_BITS - max(bits, 0.5)))


def _tiles(weight: Tensor, transposed_groups: int) -> list[int]:
    inputs = weight.numel() // out_first_shape(tuple(weight.shape), transposed_groups)[0]
    kernel = weight[0, 0].numel() if weight.dim() > 2 else 1
    wanted = [1, kernel, *LARGE_TILES]
    # C must be cheap beside the codes, and a tile lie inside one filter.
    return [t for t in dict.fromkeys(wanted) if inputs % t == 0 and (t == 1 or t * t * 8 <= weight.numel())]
