"""Projected gradient descent on a layer's output error: the paper's Algorithm 1 and its variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from factorpack.errors import PlanError
from factorpack.quantize.straight_through import fake_quantize
from factorpack.quantize.uniform import to_codes
from factorpack.record import LayerSample
from factorpack.solve.threshold import largest_mask


@dataclass(frozen=True, slots=True)
class FactorProblem:
    """Factors to improve: real-valued C (d, k) and Z (k, n), their quantizers, and S, the number of non-zeros in Z."""

    codebook: Tensor
    latent: Tensor
    codebook_scale: Tensor
    latent_scale: Tensor
    codebook_bits: int
    latent_bits: int
    kept: int
    to_weight: Callable[[Tensor], Tensor]
    """(d, n) -> the layer's weight; adds the centring vector."""

    def quantized(self, codebook: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        return (
            fake_quantize(codebook, self.codebook_scale, self.codebook_bits),
            fake_quantize(latent, self.latent_scale, self.latent_bits),
        )


@dataclass(frozen=True, slots=True)
class ProjectedGradient:
    """Adam on the mean squared error of a layer's output, with straight-through rounding.

    `threshold` is "iterative" (hard thresholding after every step, Algorithm 1) or "one-shot" (once, at
    the end). It stops after `steps` steps; with `stop="validation"` also once the error on the validation
    samples has not improved for more than `patience` steps.
    """

    steps: int = 30
    stop: Literal["steps", "validation"] = "steps"
    threshold: Literal["iterative", "one-shot"] = "iterative"
    sort: Literal["value", "code"] = "value"
    """Whether the threshold ranks by stored value or by integer code, regardless of scale."""
    learning_rate: float = 1e-4
    weight_decay: float = 1e-5
    samples: int = 64
    validation: float = 0.125
    patience: int = 2
    trace: Callable[[int, float, float], None] | None = field(default=None, compare=False)
    """Called after each step with its number and the errors on training and validation samples."""

    def __post_init__(self) -> None:
        if self.stop not in ("steps", "validation") or self.threshold not in ("iterative", "one-shot"):
            raise PlanError(
                f"stop is {self.stop!r} and threshold {self.threshold!r}; allowed are 'steps' or "
                "'validation', and 'iterative' or 'one-shot'"
            )
        if self.sort not in ("value", "code"):
            raise PlanError(f"sort is {self.sort!r}, allowed are 'value' and 'code'")
        _expect("steps", self.steps, lambda n: n >= 0, "an integer from 0 up", int)
        _expect("samples", self.samples, lambda n: n >= 2, "an integer from 2 up", int)
        _expect("patience", self.patience, lambda n: n >= 0, "an integer from 0 up", int)
        _expect("validation", self.validation, lambda x: 0 < x < 1, "a share between 0 and 1", float)
        _expect("learning_rate", self.learning_rate, lambda x: 0 < x < inf, "a number above 0", float, int)
        _expect("weight_decay", self.weight_decay, lambda x: 0 <= x < inf, "a number from 0 up", float, int)

    def solve(self, problem: FactorProblem, sample: LayerSample) -> tuple[Tensor, Tensor]:
        """Real-valued C and Z whose quantized product best reproduces the layer's output; Z is thresholded."""
        train, held = sample.first(self.samples).split(self.validation)
        codebook = problem.codebook.detach().clone().requires_grad_()
        latent = problem.latent.detach().clone().requires_grad_()
        optimizer = torch.optim.Adam(
            [codebook, latent], lr=self.learning_rate, weight_decay=self.weight_decay
        )
        best, since_best = inf, 0
        for step in range(self.steps):
            loss = output_error(problem, codebook, latent, train)
            # Not backward(): the user's bias must not accumulate gradients.
            codebook.grad, latent.grad = torch.autograd.grad(loss, [codebook, latent])
            optimizer.step()
            if self.threshold == "iterative":
                project(problem, latent, self.sort)
            if self.stop == "steps" and self.trace is None:
                continue
            with torch.no_grad():
                error = output_error(problem, codebook, latent, held).item()
            if self.trace is not None:
                self.trace(step, loss.item(), error)
            since_best = 0 if error < best else since_best + 1
            best = min(best, error)
            if self.stop == "validation" and since_best > self.patience:
                break
        project(problem, latent, self.sort)
        return codebook.detach(), latent.detach()


def _expect(name: str, value: Any, fits: Callable[[Any], bool], words: str, *kinds: type) -> None:
    """Settings may come from recipes, where a string can be given for a number."""
    if type(value) not in kinds or not fits(value):
        raise PlanError(f"{name} is {value!r}, expected {words}")


def output_error(problem: FactorProblem, codebook: Tensor, latent: Tensor, sample: LayerSample) -> Tensor:
    """(1/m) sum_i ||Y_i - [Q(C) Q(Z)] * X_i||_F^2, the paper's equation 9."""
    left, right = problem.quantized(codebook, latent)
    outputs = sample.apply(problem.to_weight(left @ right), sample.inputs)
    return (sample.outputs - outputs).square().sum() / len(sample.inputs)


def project(problem: FactorProblem, latent: Tensor, sort: Literal["value", "code"] = "value") -> None:
    """Z <- Z * M, with M the mask of the S largest values of Q(Z)."""
    with torch.no_grad():
        if sort == "value":
            quantized = fake_quantize(latent, problem.latent_scale, problem.latent_bits)
        else:
            quantized = to_codes(latent, problem.latent_scale, problem.latent_bits).to(latent.dtype)
        latent.mul_(largest_mask(quantized, latent, problem.kept))
