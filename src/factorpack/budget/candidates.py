"""Ways to code one weight: its basis and trellis by rate and distortion, and its curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, sqrt

import torch

from factorpack.budget.coding import finest_step, prepare_together, works_together
from factorpack.budget.curves import Curve
from factorpack.budget.planner import Planner
from factorpack.errors import while_compressing
from factorpack.methods import SecondOrder
from factorpack.methods.second_order import stored_steps
from factorpack.quantize.trellis import SHORTEST
from factorpack.solve.code_length import HIGH_RATE
from factorpack.solve.code_size import estimate_bytes
from factorpack.solve.layer_problem import LayerProblem, round_many
from factorpack.weight import Weight

TILES_WITHOUT_KERNEL = (16, 256)
"""Tiles tried beside none where there is no kernel to be one: a small one, and the paper's."""
WEIGHTS_PER_ENTRY = 4000
"""With as many weights for each entry of C, a basis over the kernel costs nothing and is not compared with none."""
OCTAVES = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
GAUSSIAN_BITS = 2.05
"""Entropy of a Gaussian rounded at a step of its own standard deviation, for fine steps: log2 sqrt(2 pi e)."""
VALUES_AT_ONCE = 1 << 24
VOCABULARY = 30.0
"""A relative error of words counts as much more than one of a layer: it reaches the logits undiluted."""
PATH_PAYS = 1 << 17
"""In a weight of as many values a trellis always pays; smaller ones are compared with and without."""
PATH_SAVES, PATH_RATE = 0.155, 0.7
"""Bits that a trellis saves per value at equal error where values take many bits, and how fast that is reached:
docs/results/codes.md."""
PLANNED_BYTES = 56
"""Peak memory per element while a weight is planned or coded, at one step."""
PLANNED_VALUES = 1 << 18
"""Values of a weight that plans are made on: rows are alike, so a large weight needs only some of them."""


def planning_bytes(numel: int) -> int:
    """Peak memory while weights of so many elements are planned or coded."""
    # Several steps are tried at once where a weight is small.
    return PLANNED_BYTES * min(max(numel, VALUES_AT_ONCE), (len(OCTAVES) + 1) * numel)


@dataclass(frozen=True, eq=False)
class Try:
    """A weight to be rounded by a method at some steps, to see what they give."""

    weight: Weight
    method: SecondOrder
    steps: Sequence[float]

    @cached_property
    def problem(self) -> LayerProblem:
        """Some of the weight's rows."""
        return self.method.problem(self.weight).some_rows(PLANNED_VALUES)

    def allowed_steps(self) -> list[float]:
        """The steps, no finer than 16-bit codes allow."""
        finest = finest_step(self.weight, self.method)
        return [max(step, finest) for step in self.steps]

    def shape(self) -> tuple[object, ...]:
        """What tries that can be rounded at once have in common."""
        latent, method = self.problem.latent, self.method
        joins = len(latent) == 1 and (not method.trellis or works_together(latent.device))
        own = () if joins else (id(self),)
        has_factor = self.problem.factor is not None
        return (*latent.shape, len(self.steps), method.price, method.trellis, has_factor, *own)


Measured = list[tuple[float, float]]
"""Bytes and loss at each step. The loss is in nats, by the sensitivity; without one it is the relative squared
error of the weight."""


def measure_steps(tries: Sequence[Try]) -> list[Measured]:
    """What each try gives: weights of one shape are rounded together, as many as memory allows."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, each in enumerate(tries):
        alike.setdefault(each.shape(), []).append(place)
    found: dict[int, Measured] = {}
    for places in alike.values():
        one = tries[places[0]]
        at_once = max(1, VALUES_AT_ONCE // (one.problem.latent.numel() * len(one.steps)))
        for start in range(0, len(places), at_once):
            some = places[start : start + at_once]
            found |= zip(some, _measure_together([tries[place] for place in some]), strict=True)
    return [found[place] for place in range(len(tries))]


def _measure_together(tries: Sequence[Try]) -> list[Measured]:
    one = tries[0]
    steps = stored_steps([each.allowed_steps() for each in tries], one.method.trellis)
    steps = steps.to(one.problem.latent.device)
    some = len(one.problem.latent) * one.problem.latent.shape[1]
    rows = one.weight.layout.outputs
    if len(tries) > 1:
        problems = [each.problem for each in tries]
        codes, errors = round_many(problems, steps, one.method.price, one.method.trellis)
        sizes = estimate_bytes(codes.flatten(0, 1), one.method.trellis, rows).reshape(steps.shape)
    else:
        codes, errors = one.problem.round(steps[0], one.method.price, one.method.trellis)
        sizes = estimate_bytes(codes.flatten(1, 2), one.method.trellis, rows)[None]
    scales = [rows / some * _loss_per_error(each.weight, each.method) for each in tries]
    others = _other_bytes([each.problem for each in tries])
    return [
        [(size + other, error * scale) for size, error in zip(*columns, strict=True)]
        for *columns, other, scale in zip(
            sizes.tolist(), errors.reshape(steps.shape).tolist(), others, scales, strict=True
        )
    ]


def _other_bytes(problems: Sequence[LayerProblem]) -> list[float]:
    """Of each: steps, and a basis, if there is one."""
    found = [4.0 if each.row_scales is None else 2.0 * len(each.row_scales) for each in problems]
    bases: dict[int, list[int]] = {}
    for place, each in enumerate(problems):
        if each.basis is not None:
            bases.setdefault(len(each.basis.codes), []).append(place)
    for places in bases.values():
        codes = [each.basis.codes for each in (problems[place] for place in places) if each.basis is not None]
        for place, size in zip(places, estimate_bytes(torch.stack(codes).float()).tolist(), strict=True):
            found[place] += size + 4
    return found


def _loss_per_error(weight: Weight, method: SecondOrder) -> float:
    if weight.sensitivity is not None:
        return weight.sensitivity / 2
    problem = method.problem(weight)
    return _share_of_noise(weight) / max(problem.rms**2 * problem.latent.numel(), 1e-30)


def _share_of_noise(weight: Weight) -> float:
    """How much the relative error of a weight counts where nothing else is known of it."""
    return VOCABULARY if weight.is_vocabulary else 1.0


def plan_together(weights: Mapping[str, Weight], planner: Planner, bits: float) -> dict[str, Curve]:
    """The curves of weights, by the methods that are chosen for them."""
    for name, weight in weights.items():
        with while_compressing(name):
            weight.finite()
    together = list(weights.values())
    curves = curves_of(together, choose_methods(together, planner, bits), bits)
    return dict(zip(weights, curves, strict=True))


def choose_methods(weights: Sequence[Weight], planner: Planner, bits: float) -> list[SecondOrder]:
    """For each weight the basis with the least loss + slope * bytes near `bits` per weight, C counted; then
    trellis or not. The methods' steps mean nothing yet.
    """
    ways = [
        [planner.method(tile=tile, price=_price(each)) for tile in _tiles(each, planner.basis)]
        for each in weights
    ]
    prepare_together(weights, ways)
    best = _cheapest(weights, ways, bits)
    for weight, method in zip(weights, best, strict=True):
        weight.forget(method.key(weight))
    if not planner.trellis:
        return best
    with_path = [
        _paths(weight, method, planner.trellis) for weight, method in zip(weights, best, strict=True)
    ]
    return _cheapest(weights, with_path, bits)


def _paths(weight: Weight, method: SecondOrder, trellis: int) -> list[SecondOrder]:
    """A method without and with a trellis, or the better one where that is clear.

    A path runs down rows: where they have steps of their own, quiet ones hold up the loud ones between them.
    """
    path = replace(method, trellis=trellis)
    if weight.layout.outputs < SHORTEST or weight.row_weights is not None:
        return [method]
    return [path] if weight.numel >= PATH_PAYS else [method, path]


def _cheapest(
    weights: Sequence[Weight], ways: Sequence[Sequence[SecondOrder]], bits: float
) -> list[SecondOrder]:
    """The cheapest way for each weight; where there is only one, nothing is measured."""
    tries, slopes = [], {}
    for weight, methods in zip(weights, ways, strict=True):
        if len(methods) == 1:
            continue
        reference = middle_step(weight, methods[0], bits) / step_at_unit_slope(weight, methods[0])
        # On curves of equal slope a bit is worth this much loss, also where rounding does not count bits.
        slope = (methods[0].price or HIGH_RATE) * reference**2
        slopes[id(weight)] = slope * (0.5 if weight.sensitivity is not None else 1.0)
        tries += [Try(weight, method, [reference * step_at_unit_slope(weight, method)]) for method in methods]
    costs: dict[int, list[tuple[float, SecondOrder]]] = {}
    for each, ((size, loss),) in zip(tries, measure_steps(tries), strict=True):
        cost = loss + slopes[id(each.weight)] * 8 * size
        costs.setdefault(id(each.weight), []).append((cost, each.method))
    return [
        methods[0] if len(methods) == 1 else min(costs[id(weight)], key=lambda pair: pair[0])[1]
        for weight, methods in zip(weights, ways, strict=True)
    ]


def curves_of(weights: Sequence[Weight], methods: Sequence[SecondOrder], bits: float) -> list[Curve]:
    """Seven octaves of steps about `bits` per weight, and one at which every code is zero.

    They are measured with plain codes. A path has the same error at the same step, and its bytes follow.
    """
    tries = []
    for weight, method in zip(weights, methods, strict=True):
        middle = middle_step(weight, method, bits)
        steps = [middle * 2.0**octave for octave in OCTAVES]
        plain = replace(method, trellis=0)
        tries.append(Try(weight, plain, [*steps, max(2.0 * steps[-1], 4.0 * method.problem(weight).largest)]))
    return [
        Curve(
            each.steps,
            [_bytes_along(method.trellis, size, each.weight.numel) for size, _ in measured],
            [loss for _, loss in measured],
            each.weight.numel,
            method.tile,
            step_at_unit_slope(each.weight, method),
            method.trellis,
            _price(each.weight),
        )
        for each, method, measured in zip(tries, methods, measure_steps(tries), strict=True)
    ]


def _bytes_along(trellis: int, plain: float, numel: int) -> int:
    """About the bytes of a path whose plain codes of equal error take `plain` bytes."""
    if not trellis:
        return int(plain)
    saved = PATH_SAVES * (1 - exp(-PATH_RATE * 8 * plain / numel))
    return int(plain - saved * numel / 8)


def middle_step(weight: Weight, method: SecondOrder, bits: float) -> float:
    """The step at which a Gaussian of the latent's RMS takes `bits` per value."""
    return max(method.problem(weight).rms, 1e-30) * float(2.0 ** (GAUSSIAN_BITS - max(bits, 0.5)))


def step_at_unit_slope(weight: Weight, method: SecondOrder) -> float:
    """Loss is half a sum over codes of a importance step^2 / 12: equal where step ~ (a importance)^-1/2.

    Without data the loss is a weight's squared error relative to its energy: about the share of noise in the
    layer's outputs, which adds up over layers. The step is then relative to the root of the energy.
    """
    problem = method.problem(weight)
    if weight.sensitivity is None:
        return max(problem.rms, 1e-30) * sqrt(problem.latent.numel() / _share_of_noise(weight))
    return 1.0 / sqrt(max(weight.sensitivity * problem.mean_importance, 1e-30))


def _price(weight: Weight) -> float | None:
    """What a bit is worth in rounding: nothing in tables of words, None elsewhere.

    Their rows have steps by the root of what their words matter: a price for all is too high for common ones.
    """
    return None if weight.row_weights is None else 0.0


def _tiles(weight: Weight, with_basis: bool) -> list[int]:
    if not with_basis or weight.row_weights is not None:
        return [1]
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
