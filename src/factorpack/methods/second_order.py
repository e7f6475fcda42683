"""SecondOrder: rounding with error feedback that preserves a layer's output, in a basis over its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
)
from factorpack.record import Encoded
from factorpack.solve.code_length import HIGH_RATE
from factorpack.solve.feedback import Nearest, round_with_feedback
from factorpack.solve.layer_problem import (
    CODEBOOK_BITS,
    DAMPING,
    Basis,
    LayerProblem,
    layer_problem,
    row_scales,
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
    samples: int = 256
    """Calibration samples a layer needs."""
    trellis: int = 0
    try_plain: bool = True
    """With a trellis: whether plain codes are used where they are smaller. A planner has compared them before."""
    row_steps: bool = False
    """Without calibration data: whether rows of very unlike size get steps relative to their size, and no basis."""
    smooth: bool = False
    """Without calibration data: whether the basis over a kernel expects that neighbouring inputs are alike."""

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
        for field in ("price", "damping", *(["step"] if self.step is not None else [])):
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
        found = []
        if not has_path or self.try_plain:
            found.append(encode_at(problem, self.step, weight, self.price))
        if has_path:
            found.append(encode_at(problem, self.step, weight, self.price, self.trellis))
        encoded = found[0] if len(found) == 1 else min(found, key=coded_bytes)
        size = weight.filter_size
        note = f"no basis: {self.tile} does not divide the {size} weights of a filter"
        return encoded if size % self.tile == 0 else encoded.noted(note)

    def problem(self, weight: Weight) -> LayerProblem:
        """The weight in a basis over its tiles, ready to be rounded at any step; computed once per weight."""
        tile = self.tile if weight.filter_size % self.tile == 0 else 1

        def make() -> LayerProblem:
            rows, moments = weight.rows(), self.moments_of(weight)
            unknown = weight.inputs is None and weight.sensitivity is None
            scales = row_scales(rows) if self.row_steps and unknown else None
            if scales is not None:
                return replace(layer_problem(rows / scales, None), row_scales=scales)
            second = moments.second if moments is not None else self._expected_inputs(weight, tile)
            basis = tile_basis(rows, tile, second) if tile > 1 else None
            return layer_problem(rows, moments, basis, self.damping)

        return weight.prepare((tile, self.damping), make)

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
        problem = layer_problem(rows, self.moments_of(weight), None, self.damping)
        latent = problem.latent
        nearest = Nearest(*code_range(bits))
        step = scale.to(latent).reshape(latent.shape[:2]).clamp_min(torch.finfo(latent.dtype).tiny)
        if problem.factor is None:
            codes = nearest(0, latent / step[:, :, None])
        else:
            codes, _ = round_with_feedback(latent, problem.factor, step, nearest)
        parts = {"codes": codes.reshape(rows.shape).to(torch.int8).contiguous(), "scale": scale}
        return weight.encoded("scalar", parts, {"codes": bits})


def check_trellis(states: int) -> None:
    check_type("trellis", states, int)
    if states not in (0, *MEMORY):
        raise PlanError(f"trellis is {states}, allowed are 0 and {' and '.join(map(str, MEMORY))} states")


def stored_step(step: float, trellis: int) -> Tensor:
    """The step of the codes, (1, 1) in host memory, for that of plain codes of equal error."""
    return storable(torch.tensor([[step * FINE_STEP if trellis else step]]))


def encode_at(
    problem: LayerProblem, step: float, weight: Weight, price: float = HIGH_RATE, trellis: int = 0
) -> Encoded:
    """The weight's codes at one step, as a scalar or a factors tensor."""
    stored = stored_step(step, trellis).to(problem.latent.device)
    codes, _ = problem.round(stored.float().reshape(1), price, trellis)
    largest = float(codes.abs().max())
    if largest > code_range(MAX_STORED_BITS)[1]:
        raise PlanError(
            f"at step {step} codes go up to {largest:.3g}, expected a step at which {MAX_STORED_BITS} bits do"
        )
    if problem.row_scales is not None:
        stored = storable(stored.float() * problem.row_scales.to(stored.device))
    return as_encoded(codes[0], stored, problem.basis, weight, trellis)


def as_encoded(codes: Tensor, step: Tensor, basis: Basis | None, weight: Weight, trellis: int = 0) -> Encoded:
    """Codes (groups, rows, K) of one step, (1, 1), or one per row, (out, 1), as they are stored."""
    matrix = codes.flatten(0, 1)  # (out, K)
    bits = min(max(2, int(matrix.abs().max()).bit_length() + 1), MAX_STORED_BITS)
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
