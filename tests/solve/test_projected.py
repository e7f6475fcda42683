"""Algorithm 1 against a slow twin written from the paper, its stopping rule, and its special cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear

from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.methods import QSPCA
from factorpack.quantize.uniform import fit_scale, minmax_scale, to_codes
from factorpack.record import Encoded, LayerSample
from factorpack.solve.factor import principal_basis
from factorpack.solve.projected import FactorProblem, ProjectedGradient, output_error
from factorpack.tiles import Layout
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_encoded, seeded

RATE, DECAY = 0.1, 1e-2
BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Layer:
    """A weight's shape, what the layer computes, and the inputs it takes."""

    shape: tuple[int, ...]
    inputs: tuple[int, ...]
    apply: Callable[[Tensor, Tensor], Tensor]


LAYERS = {
    "linear": Layer((12, 20), (20,), lambda w, x: linear(x, w, torch.ones(12, dtype=x.dtype))),
    "conv": Layer((8, 5, 3, 3), (5, 4, 4), lambda w, x: conv2d(x, w, padding=1)),
    "grouped": Layer((8, 3, 3, 3), (6, 4, 4), lambda w, x: conv2d(x, w, stride=2, groups=2)),
}


def build(layer: Layer, per: str = "row", kept: float = 0.5) -> tuple[FactorProblem, LayerSample]:
    """Algorithm 1's start for a random layer in float64: tile 12, rank 6, 4 and 3 bits, centred."""
    weight = seeded(*layer.shape, dtype=torch.float64)
    tiles = Weight(weight).tiles(12)
    mean = tiles.mean(1, keepdim=True)
    codebook = principal_basis(tiles - mean, 6)
    latent = codebook.T @ (tiles - mean)
    codebook_scale = minmax_scale(codebook.T, 4).T
    latent_scale = minmax_scale(latent, 3) if per == "row" else minmax_scale(latent.T, 3).T
    inputs = seeded(16, *layer.inputs, dtype=torch.float64, seed=1)
    # The outputs are another weight's, so that there is something to descend.
    target = weight + seeded(*layer.shape, dtype=torch.float64, seed=2)
    sample = LayerSample(inputs, layer.apply(target, inputs), layer.apply)
    problem = FactorProblem(
        codebook,
        latent,
        codebook_scale,
        latent_scale,
        codebook_bits=4,
        latent_bits=3,
        kept=round(kept * latent.numel()),
        to_weight=lambda product: Layout(layer.shape).from_tiles(product + mean),
    )
    return problem, sample


class Twin:
    """The paper's Algorithm 1, line by line: own quantizers, gradients, Adam, sort and mask."""

    def __init__(
        self, problem: FactorProblem, sample: LayerSample, iterative: bool, by_code: bool = False
    ) -> None:
        self.problem, self.iterative, self.by_code = problem, iterative, by_code
        held = round(len(sample.inputs) / 8)
        self.train = (sample.inputs[:-held], sample.outputs[:-held])
        self.held = (sample.inputs[-held:], sample.outputs[-held:])
        self.apply = sample.apply
        self.factors = [problem.codebook.clone(), problem.latent.clone()]
        self.first = [torch.zeros_like(each) for each in self.factors]
        self.second = [torch.zeros_like(each) for each in self.factors]

    def steps(self) -> Iterator[tuple[float, float, Tensor, Tensor]]:
        """After each step: both errors, C, and Z as it would be returned now."""
        for step in itertools.count(1):
            error, gradients = self.gradients()
            for i, gradient in enumerate(gradients):
                self.update(i, gradient + DECAY * self.factors[i], step)
            thresholded = self.factors[1] * self.mask()
            if self.iterative:
                self.factors[1] = thresholded
            yield error, self.error(*self.held).item(), self.factors[0].clone(), thresholded

    def update(self, i: int, gradient: Tensor, step: int) -> None:
        """Kingma and Ba's Adam, with the L2 penalty already in the gradient."""
        self.first[i] = BETAS[0] * self.first[i] + (1 - BETAS[0]) * gradient
        self.second[i] = BETAS[1] * self.second[i] + (1 - BETAS[1]) * gradient**2
        mean = self.first[i] / (1 - BETAS[0] ** step)
        variance = self.second[i] / (1 - BETAS[1] ** step)
        self.factors[i] = self.factors[i] - RATE * mean / (variance**0.5 + EPSILON)

    def quantizers(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Both quantized factors, and where the straight-through gradient passes the clamp."""

        def quantize(values: Tensor, scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
            low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            code = torch.floor(values / scale + 0.5)
            passes = (values / scale >= low) & (values / scale <= high)
            return torch.minimum(torch.maximum(code, torch.tensor(low)), torch.tensor(high)) * scale, passes

        p = self.problem
        return (
            quantize(self.factors[0], p.codebook_scale, p.codebook_bits),
            quantize(self.factors[1], p.latent_scale, p.latent_bits),
        )

    def error(self, inputs: Tensor, outputs: Tensor, product: Tensor | None = None) -> Tensor:
        """The paper's equation 9, sample by sample."""
        if product is None:
            (codebook, _), (latent, _) = self.quantizers()
            product = codebook @ latent
        weight = self.problem.to_weight(product)
        each = [
            ((y - self.apply(weight, x[None])[0]) ** 2).sum() for x, y in zip(inputs, outputs, strict=True)
        ]
        return torch.stack(each).sum() / len(each)

    def gradients(self) -> tuple[float, list[Tensor]]:
        (codebook, codebook_passes), (latent, latent_passes) = self.quantizers()
        product = (codebook @ latent).requires_grad_()
        error = self.error(*self.train, product)
        (slope,) = torch.autograd.grad(error, product)  # (d, n)
        return error.item(), [(slope @ latent.T) * codebook_passes, (codebook.T @ slope) * latent_passes]

    def mask(self) -> Tensor:
        """The S largest of |Q(Z)|, or of the codes behind it; equals by |Z|."""
        values = self.quantizers()[1][0]
        if self.by_code:
            values = (values / self.problem.latent_scale).round()
        stored, latent = values.flatten().tolist(), self.factors[1].flatten().tolist()
        order = sorted(range(len(stored)), key=lambda i: (abs(stored[i]), abs(latent[i])), reverse=True)
        mask = torch.zeros(len(stored), dtype=torch.float64)
        mask[order[: self.problem.kept]] = 1.0
        return mask.reshape(self.factors[1].shape)


@pytest.mark.parametrize("sort", ["value", "code"])
@pytest.mark.parametrize("threshold", ["iterative", "one-shot"])
@pytest.mark.parametrize("per", ["row", "column"])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_step_is_the_papers(layer: str, per: str, threshold: str, sort: str) -> None:
    problem, sample = build(LAYERS[layer], per)
    twin = Twin(problem, sample, threshold == "iterative", sort == "code").steps()
    errors: list[tuple[float, float]] = []
    seen = [to_codes(problem.latent, problem.latent_scale, 3)]
    for steps in range(1, 7):
        error, held, codebook, latent = next(twin)
        errors.append((error, held))
        traced: list[tuple[float, float]] = []
        solver = ProjectedGradient(
            steps,
            threshold=threshold,  # type: ignore[arg-type]
            sort=sort,  # type: ignore[arg-type]
            learning_rate=RATE,
            weight_decay=DECAY,
            trace=lambda _, *both, traced=traced: traced.append(both),
        )
        found = solver.solve(problem, sample)
        assert torch.equal(found[1] == 0, latent == 0)
        assert_close(found[0], codebook)
        assert_close(found[1], latent)
        assert_close(torch.tensor(traced), torch.tensor(errors), torch.float64)
        seen.append(to_codes(found[1], problem.latent_scale, 3))
    # Otherwise the agreement would say nothing: codes moved, and so did the mask.
    assert len({codes.numpy().tobytes() for codes in seen}) > 3
    assert len({(codes != 0).numpy().tobytes() for codes in seen[1:]}) > 1


@pytest.mark.parametrize("threshold", ["iterative", "one-shot"])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.8, 1.0])
def test_no_steps_is_the_start_thresholded(kept: float, threshold: str) -> None:
    problem, sample = build(LAYERS["conv"], kept=kept)
    codebook, latent = ProjectedGradient(0, threshold=threshold).solve(problem, sample)  # type: ignore[arg-type]
    assert torch.equal(codebook, problem.codebook)
    assert torch.equal(latent, problem.latent * Twin(problem, sample, True).mask())


def test_the_problem_is_left_as_it_was() -> None:
    problem, sample = build(LAYERS["linear"])
    before = problem.codebook.clone(), problem.latent.clone()
    found = ProjectedGradient(3, learning_rate=RATE).solve(problem, sample)
    assert torch.equal(problem.codebook, before[0])
    assert torch.equal(problem.latent, before[1])
    assert not any(each.requires_grad for each in found)


# -- stopping ----------------------------------------------------------------------------------------


def scripted(errors: list[float]) -> LayerSample:
    """A layer that gives the validation sample the errors of a script, one after another."""
    script = iter(errors)
    marks = torch.tensor([[0.0]] * 7 + [[1.0]], dtype=torch.float64)

    def apply(weight: Tensor, inputs: Tensor) -> Tensor:
        if inputs[0, 0] == 0:
            return weight.sum() * torch.ones_like(inputs)
        assert inputs.shape == (1, 1)
        return torch.full((1, 1), next(script), dtype=torch.float64).sqrt()

    return LayerSample(marks, torch.zeros(8, 1, dtype=torch.float64), apply)


STOPS: dict[str, tuple[list[float], int, int]] = {
    "falls to the end": ([9, 4, 1, 0.25, 0], 2, 5),
    "equal is not falling": ([9, 4, 4, 4, 4, 1, 0], 2, 5),
    "exactly `patience` steps are borne": ([9, 4, 16, 16, 1, 0.25, 0], 2, 7),
    "a new best starts the count anew": ([9, 16, 16, 4, 16, 16, 16, 0], 2, 7),
    "below the last but not the best": ([4, 16, 9, 6.25, 0], 2, 4),
    "rises from the start": ([1, 4, 9, 16, 0], 2, 4),
    "no patience": ([9, 4, 4, 0], 0, 3),
    "more patience": ([1, 4, 4, 4, 4, 4, 4, 4], 5, 7),
    "never a number": ([math.nan] * 6, 2, 3),
}


@pytest.mark.parametrize("case", STOPS)
def test_it_stops_once_validation_has_not_fallen_for_more_than_patience_steps(case: str) -> None:
    errors, patience, expected = STOPS[case]
    problem, _ = build(LAYERS["linear"])
    seen: list[tuple[int, float]] = []
    solver = ProjectedGradient(
        len(errors),
        stop="validation",
        patience=patience,
        trace=lambda step, _, held: seen.append((step, held)),
    )
    solver.solve(problem, scripted(errors))
    assert [step for step, _ in seen] == list(range(expected))
    assert str([held for _, held in seen]) == str([float(error) for error in errors[:expected]])


def test_without_the_rule_validation_is_only_told() -> None:
    errors = [1.0, 4.0, 4.0, 9.0, 9.0, 9.0]
    problem, _ = build(LAYERS["linear"])
    seen: list[float] = []
    ProjectedGradient(6, trace=lambda *told: seen.append(told[2])).solve(problem, scripted(errors))
    assert seen == errors


def test_where_it_stops_the_rest_is_as_with_that_many_steps() -> None:
    problem, sample = build(LAYERS["conv"])
    seen: list[int] = []
    patient = ProjectedGradient(
        100, "validation", learning_rate=1.0, patience=0, trace=lambda step, *_: seen.append(step)
    )
    found = patient.solve(problem, sample)
    assert 0 < len(seen) < 100
    expected = ProjectedGradient(len(seen), learning_rate=1.0).solve(problem, sample)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("given", "samples", "train", "held"),
    [(64, 64, 56, 8), (100, 64, 56, 8), (16, 64, 14, 2), (3, 64, 2, 1), (2, 64, 1, 1), (1, 64, 1, 1)],
)
def test_an_eighth_of_the_samples_is_held_out(given: int, samples: int, train: int, held: int) -> None:
    problem, _ = build(LAYERS["linear"])
    inputs = torch.arange(float(given), dtype=torch.float64)[:, None]
    seen: list[list[float]] = []

    def apply(weight: Tensor, values: Tensor) -> Tensor:
        seen.append(values[:, 0].tolist())
        return weight.sum() * torch.ones_like(values)

    solver = ProjectedGradient(1, samples=samples, trace=lambda *_: None)
    solver.solve(problem, LayerSample(inputs, torch.zeros_like(inputs), apply))
    used = list(range(min(given, samples)))
    assert seen == [used[:train], used[-held:]]


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": -1},
        {"steps": "many"},
        {"stop": "never"},
        {"threshold": "soft"},
        {"sort": "size"},
        {"samples": 1},
        {"validation": 0.0},
        {"validation": 1.0},
        {"patience": -1},
        {"patience": 1.5},
        {"learning_rate": 0.0},
        {"learning_rate": "fast"},
        {"learning_rate": math.nan},
        {"weight_decay": -1e-5},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=str(next(iter(settings)))):
        ProjectedGradient(**settings)  # type: ignore[arg-type]


# -- through the method ------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["row", "column"])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.25, 0.9])
def test_sparsity_counts_on_top_of_accidental_zeros(sparsity: float, per: str) -> None:
    """S is what rounding leaves of the start, less the share of all entries."""
    layer = LAYERS["conv"]
    weight = seeded(*layer.shape)
    inputs = seeded(8, *layer.inputs, seed=1)
    sample = LayerSample(inputs, layer.apply(weight, inputs), layer.apply)

    def encode(steps: int) -> Encoded:
        method = QSPCA(6, 3, sparsity, tile=16, latent_scales=per, solver=ProjectedGradient(steps))  # type: ignore[arg-type]
        return method.encode(Weight(weight, inputs=sample))

    tiles = Weight(weight).tiles(16)
    tiles = tiles - tiles.mean(1, keepdim=True, dtype=torch.float64).float()
    latent = principal_basis(tiles, 6).T @ tiles
    scale = fit_scale(latent, 3) if per == "row" else fit_scale(latent.T, 3).T
    codes = to_codes(latent, scale, 3)
    accidental = codes.numel() - int(codes.count_nonzero())
    assert accidental > 0
    extra = min(round(sparsity * codes.numel()), codes.numel() - accidental)
    start = encode(0)
    assert start.extra_zeros == extra
    assert int((start.parts["latent"] == 0).sum()) == accidental + extra
    assert int((encode(3).parts["latent"] == 0).sum()) >= accidental + extra or sparsity == 0
    assert encode(3).extra_zeros == extra


def test_without_sparsity_nothing_is_masked() -> None:
    problem, sample = build(LAYERS["conv"], kept=1.0)
    latent = ProjectedGradient(4, learning_rate=RATE).solve(problem, sample)[1]
    assert latent.all()
    assert (to_codes(latent, problem.latent_scale, 3) == 0).any()


def test_a_recipe_s_table_is_the_same_solver() -> None:
    table = {"steps": 4, "stop": "validation", "threshold": "one-shot"}
    from_table = QSPCA(4, 3, tile=16, solver=table)  # type: ignore[arg-type]
    assert from_table == QSPCA(4, 3, tile=16, solver=ProjectedGradient(4, "validation", "one-shot"))
    assert from_table.samples == 64
    with pytest.raises(PlanError, match="unknown setting 'step' for the solver, known are steps, stop"):
        QSPCA(4, 3, solver={"step": 4})  # type: ignore[arg-type]


def test_a_solver_without_data_is_refused() -> None:
    with pytest.raises(PlanError, match="needs calibration data"):
        QSPCA(4, 3, tile=16, solver=ProjectedGradient()).encode(Weight(seeded(32, 32)))


def test_the_same_twice() -> None:
    layer = LAYERS["grouped"]
    weight, inputs = seeded(*layer.shape), seeded(8, *layer.inputs, seed=1)
    sample = LayerSample(inputs, layer.apply(weight, inputs), layer.apply)
    method = QSPCA(6, 3, 0.2, tile=12, solver=ProjectedGradient(5, "validation", "one-shot"))
    assert_same_encoded(
        method.encode(Weight(weight, inputs=sample)), method.encode(Weight(weight, inputs=sample))
    )


# -- the paper's special cases ------------------------------------------------------------------------


class Unquantized(FactorProblem):
    """Q_c = Q_z = id."""

    def quantized(self, codebook: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        return codebook, latent


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_pca_without_quantizers_the_start_is_optimal(rank: int) -> None:
    """Eckart-Young: on white inputs the start loses the discarded energy, and no step loses less."""
    weight = seeded(24, 16, dtype=torch.float64)
    tiles = Weight(weight).tiles(12)  # (12, 32)
    tiles = tiles - tiles.mean(1, keepdim=True)
    mean = Weight(weight).tiles(12) - tiles
    basis = principal_basis(tiles, rank)
    bound = torch.linalg.svdvals(tiles)[rank:].square().sum()
    one = torch.ones(1, 1, dtype=torch.float64)
    problem = Unquantized(
        basis,
        basis.T @ tiles,
        one,
        one,
        8,
        8,
        basis.shape[1] * 32,
        lambda p: Layout((24, 16)).from_tiles(p + mean),
    )
    # An orthonormal basis as the inputs of a linear layer: the outputs' error is the weight's.
    inputs = torch.linalg.qr(seeded(16, 16, dtype=torch.float64, seed=1)).Q
    white = LayerSample(inputs, inputs @ weight.T, lambda w, x: linear(x, w))
    factors = [problem.codebook.clone().requires_grad_(), problem.latent.clone().requires_grad_()]
    start = output_error(problem, factors[0], factors[1], white) * len(inputs)
    assert_close(start.detach(), bound)
    for gradient in torch.autograd.grad(start, factors):
        assert_close(gradient + tiles.norm(), torch.ones_like(gradient) * tiles.norm())
    twice = replace(white, inputs=inputs.repeat(2, 1), outputs=white.outputs.repeat(2, 1))
    found = ProjectedGradient(20, validation=0.5).solve(problem, twice)
    after = output_error(problem, *found, white) * len(inputs)
    assert after >= bound * (1 - 256 * torch.finfo(torch.float64).eps)


def factors_of(codebook: Tensor, latent: Tensor) -> Encoded:
    """An `Encoded` with powers of two for scales, so that decoding is exact."""
    parts = {
        "codebook": codebook.to(torch.int8),
        "codebook_scale": 2.0 ** -torch.arange(codebook.shape[1], dtype=torch.float16)[None],
        "latent": latent.to(torch.int8),
        "latent_scale": torch.ones(latent.shape[0], 1, dtype=torch.float16),
    }
    shape = (latent.shape[1], codebook.shape[0])
    return Encoded("factors", shape, torch.float32, parts, {"codebook": 4, "latent": 2})


CODEBOOK = torch.randint(-8, 8, (6, 5), generator=torch.Generator().manual_seed(0))
CODEWORDS = CODEBOOK * 2.0 ** -torch.arange(5.0)


def test_a_one_hot_latent_is_vector_quantization() -> None:
    chosen = torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(1))
    one_hot = torch.nn.functional.one_hot(chosen, 5).T  # (k, n)
    assert torch.equal(decode(factors_of(CODEBOOK, one_hot)), CODEWORDS.T[chosen])


def test_a_binary_latent_is_additive_vector_quantization() -> None:
    terms = torch.randint(0, 2, (5, 40), generator=torch.Generator().manual_seed(1))
    decoded = decode(factors_of(CODEBOOK, terms))
    for tile, row in enumerate(decoded):
        chosen = [CODEWORDS[:, word] for word in range(5) if terms[word, tile]]
        assert torch.equal(row, sum(chosen, start=torch.zeros(6)))


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_tiles_of_a_filter_row_are_the_spatial_svd(rank: int) -> None:
    """d = f_in w and n = f_out h: Jaderberg et al.'s separable filters, as good as any and as wide."""
    outs, ins, high, wide = 6, 4, 3, 5
    weight = seeded(outs, ins, high, wide, dtype=torch.float64)
    rows_first = weight.permute(0, 2, 1, 3)  # (out, h, in, w): a column of the matrix is one filter row
    tiles = Weight(rows_first).tiles(ins * wide)
    codebook = principal_basis(tiles, rank)
    latent = codebook.T @ tiles
    found = Layout(tuple(rows_first.shape)).from_tiles(codebook @ latent).permute(0, 2, 1, 3)
    spatial = weight.permute(1, 3, 0, 2).reshape(ins * wide, outs * high)
    left, values, right = torch.linalg.svd(spatial, full_matrices=False)
    assert_close((found - weight).square().sum(), values[rank:].square().sum())
    truncated = left[:, :rank] * values[:rank] @ right[:rank]
    assert_close(found, truncated.reshape(ins, wide, outs, high).permute(2, 0, 3, 1))
    images = seeded(2, ins, 7, 9, dtype=torch.float64, seed=1)
    horizontal = codebook.T.reshape(rank, ins, 1, wide)
    vertical = latent.reshape(rank, outs, high, 1).transpose(0, 1)
    assert_close(conv2d(conv2d(images, horizontal), vertical), conv2d(images, found))
