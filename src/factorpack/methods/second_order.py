"""SecondOrder: rounding with error feedback that preserves a layer's output, in a basis over its tiles."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import ClassVar

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.format.streams import coded_bytes
from factorpack.methods.method import Method
from factorpack.methods.settings import check_type
from factorpack.quantize.trellis import MEMORY, SHORTEST
from factorpack.quantize.uniform import (
    MAX_STORED_BITS,
    check_bits,
    code_dtype,
    code_range,
    fit_scale,
    storable,
    storable_alone,
)
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.code_length import HIGH_RATE
from factorpack.solve.feedback import Nearest, round_with_feedback
from factorpack.solve.layer_problem import (
    CODEBOOK_BITS,
    DAMPING,
    Basis,
    LayerProblem,
    layer_problem,
    layer_problems,
    restoring_factor,
    round_many,
    row_scales,
    scales_of_weights,
    smooth_inputs,
    tile_basis,
)
from factorpack.solve.trellis_search import FINE_STEP
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class SecondOrder(Method):
    """Codes of one `step` for a whole layer, as wide as needed, or of `bits` with one scale per channel.

    Each column's rounding error is fed into the columns not yet rounded, so that the layer's *output*
    changes least. `price` is what a bit of the entropy-coded file is worth, in squared steps. With `tile`
    above 1 the codes are latents in a basis over tiles of that many weights, such as a 3x3 kernel. Without
    calibration data the error of the weights themselves is minimised. With a `trellis` of 4 or 8 states the
    codes are a path through it where that makes them smaller: fewer bits at the same error.
    """

    step: float | None = None
    bits: int | None = None
    tile: int = 1
    price: float = HIGH_RATE
    damping: float = DAMPING
    """Added to the diagonal of the inputs' second moments, as a share of its mean."""
    samples: int = 256
    """Calibration samples a layer needs."""
    trellis: int = 0
    try_plain: bool = True
    """With a trellis: whether plain codes are used where they are smaller. A planner has compared them before."""
    row_steps: bool = False
    """Without calibration data: whether rows of very unlike size get steps relative to their size, and no basis."""
    smooth: bool = False
    """Without calibration data: whether the basis over a kernel expects that neighbouring inputs are alike."""
    restore_size: bool = False
    """Without calibration data: whether the stored step makes up for what rounding towards zero took away."""
    ridge: float | None = None
    """Added likewise where the weight adapts to inputs that compression has changed; None: the damping."""
    reorder: bool = True
    """Whether columns of Linear layers are rounded in the order in which feedback costs least, or from first to
    last. It makes less error in convolutions too, but networks of these diverge more: docs/method.md."""

    name: ClassVar[str] = "second_order"
    title: ClassVar[str] = "error feedback, fixed width"
    suits_anything: ClassVar[bool] = True
    peak_factor: ClassVar[float] = 17.0
    wants_moments: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.step is None) == (self.bits is None):
            raise PlanError(f"step is {self.step} and bits {self.bits}: give exactly one of them")
        for field in ("tile", "samples"):
            check_type(field, getattr(self, field), int)
        optional = [field for field in ("step", "ridge") if getattr(self, field) is not None]
        for field in ("price", "damping", *optional):
            check_type(field, getattr(self, field), float, int)
        if self.bits is not None:
            check_type("bits", self.bits, int)
            check_bits("bits", self.bits)
        check_trellis(self.trellis)
        if self.trellis and self.bits is not None:
            raise PlanError(
                f"bits is {self.bits}: a trellis of {self.trellis} states is for codes of one step"
            )
        if self.step is not None and not 0 < self.step < inf:
            raise PlanError(f"step is {self.step}, expected a number above 0")
        if self.ridge is not None and not 0 < self.ridge < inf:
            raise PlanError(f"ridge is {self.ridge}, expected a number above 0")
        least = self.tile >= 1 and self.samples >= 0
        if not (least and 0 <= self.price < inf and 0 < self.damping < inf):
            raise PlanError(
                f"tile {self.tile}, samples {self.samples}, price {self.price}, damping {self.damping}: "
                "expected from 1 up, from 0 up, from 0 up, and above 0"
            )

    def encode(self, weight: Weight) -> Encoded:
        self.moments_of(weight)
        if weight.values.dim() < 2:
            raise PlanError("second-order rounding is for weights of two dimensions or more: keep this one")
        if self.bits is not None:
            return self._encode_fixed_width(weight, self.bits)
        assert self.step is not None
        problem = self.problem(weight)
        has_path = bool(self.trellis) and weight.layout.outputs >= SHORTEST
        restores = self.restore_size and _is_unknown(weight)
        paths = [0] if not has_path or self.try_plain else []
        paths += [self.trellis] if has_path else []
        found = [encode_at(problem, self.step, weight, self.price, path, restores) for path in paths]
        encoded = found[0] if len(found) == 1 else min(found, key=coded_bytes)
        size = weight.filter_size
        note = f"no basis: {self.tile} does not divide the {size} weights of a filter"
        return encoded if size % self.tile == 0 else encoded.noted(note)

    def problem(self, weight: Weight) -> LayerProblem:
        """The weight in a basis over its tiles, ready to be rounded at any step; computed once per weight."""
        tile, reorder = self._tile_of(weight), self._reorders(weight)

        def make() -> LayerProblem:
            rows, moments = weight.rows(), self.moments_of(weight)
            moments = None if moments is None else moments.about_mean(rows)
            scales = self._row_scales(weight, rows)
            if scales is not None:
                cross = None if moments is None or moments.cross is None else moments.cross / scales
                scaled = None if moments is None else replace(moments, cross=cross)
                problem = layer_problem(rows / scales, scaled, None, self.damping, self.ridge, reorder)
                return replace(problem, row_scales=scales)
            second = moments.second if moments is not None else self._expected_inputs(weight, tile)
            basis = tile_basis(rows, tile, second) if tile > 1 else None
            return layer_problem(rows, moments, basis, self.damping, self.ridge, reorder)

        return weight.prepare(self.key(weight), make)

    def key(self, weight: Weight) -> Hashable:
        """What the problem of a weight is kept under."""
        return (self._tile_of(weight), self.damping, self.ridge, self.reorder)

    def _reorders(self, weight: Weight) -> bool:
        return self.reorder and weight.values.dim() == 2

    def _tile_of(self, weight: Weight) -> int:
        divides = weight.filter_size % self.tile == 0
        return self.tile if divides and weight.row_weights is None else 1

    def _row_scales(self, weight: Weight, rows: Tensor) -> Tensor | None:
        """What rows are divided by, so that one step suits them all, (out, 1); None: by nothing."""
        if weight.row_weights is not None:
            return scales_of_weights(weight.row_weights)
        return row_scales(rows) if self.row_steps and _is_unknown(weight) else None

    def prepare_together(self, weights: Sequence[Weight]) -> None:
        """`problem` of weights of one shape, at once for those that have moments of one group and lack it."""
        known: list[tuple[Weight, LayerMoments]] = []
        for weight in weights:
            moments = self.moments_of(weight)
            if moments is not None and len(moments.second) == 1 and weight.row_weights is None:
                known += [] if weight.is_prepared(self.key(weight)) else [(weight, moments)]
        if len(known) < 2:
            return
        rows = torch.stack([weight.rows() for weight, _ in known])
        seen, tile = [moments for _, moments in known], self._tile_of(weights[0])
        problems = layer_problems(rows, seen, tile, self.damping, self.ridge, self._reorders(weights[0]))
        for (weight, _), problem in zip(known, problems, strict=True):
            weight.prepare(self.key(weight), partial(_same, problem))

    def _expected_inputs(self, weight: Weight, tile: int) -> Tensor | None:
        """Second moments to assume of the inputs to a tile that is one kernel of a convolution."""
        kernel = weight.shape[2:]
        return smooth_inputs(kernel) if self.smooth and kernel and prod(kernel) == tile > 1 else None

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        return [[cls(bits=bits) for bits in range(2, 9)]]

    def _encode_fixed_width(self, weight: Weight, bits: int) -> Encoded:
        rows = weight.rows()
        scale = fit_scale(rows, bits).to(rows.device)
        problem = layer_problem(
            rows, self.moments_of(weight), None, self.damping, self.ridge, self._reorders(weight)
        )
        latent = problem.latent
        nearest = Nearest(*code_range(bits))
        step = scale.to(latent).reshape(latent.shape[:2]).clamp_min(torch.finfo(latent.dtype).tiny)
        if problem.factor is None:
            codes = nearest(0, latent / step[:, :, None])
        else:
            codes, _ = round_with_feedback(problem.in_order(), problem.factor, step, nearest)
            codes = problem.as_were(codes)
        parts = {"codes": codes.reshape(rows.shape).to(torch.int8).contiguous(), "scale": scale}
        return weight.encoded("scalar", parts, {"codes": bits})


def _is_unknown(weight: Weight) -> bool:
    """Whether no calibration data have shown anything of a weight."""
    return weight.inputs is None and weight.sensitivity is None


def _same(problem: LayerProblem) -> LayerProblem:
    return problem


def check_trellis(states: int) -> None:
    check_type("trellis", states, int)
    if states not in (0, *MEMORY):
        raise PlanError(f"trellis is {states}, allowed are 0 and {' and '.join(map(str, MEMORY))} states")


def stored_step(step: float, trellis: int) -> Tensor:
    """The step of the codes, (1, 1) in host memory, for that of plain codes of equal error."""
    return storable(torch.tensor([[step * FINE_STEP if trellis else step]]))


def stored_steps(steps: Sequence[Sequence[float]], trellis: int) -> Tensor:
    """The values of `stored_step` for each of a table of steps, in FP32."""
    return storable_alone(
        torch.tensor([[step * FINE_STEP if trellis else step for step in row] for row in steps])
    )


def encode_at(
    problem: LayerProblem,
    step: float,
    weight: Weight,
    price: float = HIGH_RATE,
    trellis: int = 0,
    restore_size: bool = False,
) -> Encoded:
    """The weight's codes at one step, as a scalar or a factors tensor."""
    stored = stored_step(step, trellis).to(problem.latent.device)
    codes, _ = problem.round(stored.float().reshape(1), price, trellis)
    if restore_size:
        stored = storable(stored.float() * restoring_factor(problem.latent, codes[0], float(stored)))
    if problem.row_scales is not None:
        stored = storable(stored.float() * problem.row_scales.to(stored.device))
    largest = _checked(float(codes.abs().max()), step)
    return as_encoded(codes[0], stored, problem.basis, weight, trellis, largest)


def encode_each_at(
    problems: Sequence[LayerProblem],
    steps: Sequence[float],
    weights: Sequence[Weight],
    price: float,
    trellis: int = 0,
) -> list[Encoded]:
    """`encode_at` of weights of one shape and one group, each at its own step, rounded at once."""
    stored = [stored_step(step, trellis) for step in steps]
    moved = torch.cat([each.float() for each in stored]).to(problems[0].latent.device)  # (weights, 1)
    codes, _ = round_many(problems, moved, price, trellis)
    largest = [
        _checked(found, step) for found, step in zip(codes.abs().amax((1, 2, 3)).tolist(), steps, strict=True)
    ]
    scales = [part.to(each.dtype) for part, each in zip(moved.split(1), stored, strict=True)]
    bases = [each.basis for each in problems]
    return [
        as_encoded(*each[:-1], trellis, each[-1])
        for each in zip(codes, scales, bases, weights, largest, strict=True)
    ]


def _checked(largest: float, step: float) -> float:
    """The largest magnitude of codes at a step, if it can be stored."""
    if largest > code_range(MAX_STORED_BITS)[1]:
        raise PlanError(
            f"at step {step} codes go up to {largest:.3g}, expected a step at which {MAX_STORED_BITS} bits do"
        )
    return largest


def as_encoded(
    codes: Tensor,
    step: Tensor,
    basis: Basis | None,
    weight: Weight,
    trellis: int = 0,
    largest: float | None = None,
) -> Encoded:
    """Codes (groups, rows, K) of one step, (1, 1), or one per row, (out, 1), as they are stored.

    `largest` is their largest magnitude, where it is known.
    """
    matrix = codes.flatten(0, 1)  # (out, K)
    if largest is None:
        largest = float(matrix.abs().max())
    bits = min(max(2, int(largest).bit_length() + 1), MAX_STORED_BITS)
    matrix = matrix.clamp(*code_range(bits)).to(code_dtype(bits))
    if basis is None:
        parts = {"codes": matrix.contiguous(), "scale": step}
        return weight.encoded("scalar", parts, {"codes": bits}, trellis=trellis)
    tile = len(basis.codes)
    parts = {
        "codebook": basis.codes.contiguous(),
        "codebook_scale": basis.scale,
        "latent": matrix.reshape(-1, tile).T.contiguous(),  # (d, out * K/d)
        "latent_scale": step,
    }
    return weight.encoded("factors", parts, {"codebook": CODEBOOK_BITS, "latent": bits}, trellis=trellis)
