"""Second-order rounding of one layer: one step size for all its codes, in a basis over its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf

import torch
from torch import Tensor

from factorpack.quantize.uniform import code_range, from_codes, root_mean_square, storable, to_codes
from factorpack.record import LayerMoments
from factorpack.solve.code_length import HIGH_RATE, CodeLengths, fit_lengths
from factorpack.solve.feedback import (
    cholesky,
    feedback_factor,
    inherited_variance,
    mean_diagonal,
    round_with_feedback,
    rounding_order,
)
from factorpack.solve.trellis_search import FINE_STEP, TrellisLengths, fit_trellis

CODEBOOK_BITS = 8
DAMPING = 0.03
NEIGHBOURS = 0.5
"""The correlation of inputs one position apart that is expected without data: chosen on training images."""
MOST_RESTORED = 2.0
"""Values are multiplied by no more than this: where codes are nearly all zero, noise would be."""
ENOUGH = 8
"""Positions per input from which on a weight is held less while it adapts."""
ROW_SPREAD, DEAD_ROW = 0.01, 2.0**-20
KEPT_NOISE = 1 << 21
"""Values of noise that are kept: to draw them takes longer than all else that a small weight needs of it."""
FEWEST_ROWS = 64
"""A sample of rows has at least as many, where there are as many."""


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """C, quantized: every tile of d elements is C times d latents."""

    codes: Tensor
    """(d, d), int8, and one scale for all, (1, 1); or both with a dimension of layers before them."""
    scale: Tensor

    def matrix(self) -> Tensor:
        return from_codes(self.codes, self.scale)


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """A layer to be rounded at any step size: its best real-valued latent, and the cost of errors in it."""

    latent: Tensor
    """(groups, rows, K)."""
    factor: Tensor | None
    """U of feedback.py, (groups, K, K); None without input moments."""
    basis: Basis | None
    row_scales: Tensor | None = None
    """What the rows of the weight were divided by, (out, 1); None: by nothing."""
    order: Tensor | None = None
    """The columns of `latent` in the order in which they are rounded, that of `factor`, (K,); None: as they are."""

    @cached_property
    def rms(self) -> float:
        found = float(self.latent.square().mean().sqrt())
        # The squares of numbers such as 1e19 overflow, those of 1e-25 underflow.
        return found if 0.0 < found < inf else root_mean_square(self.latent)

    @cached_property
    def largest(self) -> float:
        """The largest magnitude of the latent."""
        return float(self.latent.abs().max())

    @cached_property
    def mean_importance(self) -> float:
        return float(self.importance().mean())

    def importance(self) -> Tensor:
        """The output error per squared error in each column, after feedback: (groups, K)."""
        if self.factor is None:
            return self.latent.new_ones(len(self.latent), self.latent.shape[2])
        return self.factor.diagonal(dim1=1, dim2=2).pow(-2)

    def some_rows(self, values: int) -> LayerProblem:
        """The same with about `values` values: rows from the quietest to the loudest, evenly spaced by rank."""
        groups, rows, size = self.latent.shape
        most = max(values // (groups * size), FEWEST_ROWS)
        if rows <= most:
            return self
        ranks = torch.linspace(0, rows - 1, most, device=self.latent.device).round().long()
        picked = self.latent.square().sum(2).argsort(1)[:, ranks].sort(1).values
        return replace(self, latent=self.latent.gather(1, picked[:, :, None].expand(-1, -1, size)))

    def round(self, steps: Tensor, price: float = HIGH_RATE, trellis: int = 0) -> tuple[Tensor, Tensor]:
        """Codes (steps, groups, rows, K) for several step sizes, (steps,), and the output error of each, (steps,).

        One bit is worth `price` squared steps of error. With a `trellis` of that many states, the codes are a
        path through it, and the step is FINE_STEP times the plain one, which is the unit of the price.
        """
        count = len(steps)
        groups, rows, size = self.latent.shape
        steps = steps.to(self.latent)
        latent = self.in_order().repeat(count, 1, 1)
        # Few values say little about code lengths: the groups of a depthwise layer share theirs.
        unit = latent.reshape(count, groups * rows, size) / steps[:, None, None]
        if trellis:
            lengths: TrellisLengths | CodeLengths = fit_trellis(
                self._with_feedback_noise(unit), price, trellis
            )
        else:
            lengths = fit_lengths(unit, price)
        if self.factor is None:
            codes = lengths.round_all(unit)
            error = (unit - codes).square().sum((1, 2)) * steps.square()
            return codes.reshape(count, groups, rows, size), error
        codes, left = round_with_feedback(
            latent,
            self.factor if groups == 1 else self.factor.repeat(count, 1, 1),
            steps.repeat_interleave(groups)[:, None],
            lengths if isinstance(lengths, TrellisLengths) else lengths.by_group(groups),
        )
        return self.as_were(codes.reshape(count, groups, rows, size)), left.reshape(count, -1).sum(1)

    def in_order(self) -> Tensor:
        """The latent, its columns in the order in which they are rounded."""
        return self.latent if self.order is None else self.latent[:, :, self.order]

    def as_were(self, codes: Tensor) -> Tensor:
        """Codes (..., K) in the order of rounding, put back in that of the latent."""
        return codes if self.order is None else codes[..., self._places]

    @cached_property
    def _places(self) -> Tensor:
        """Where each column of the latent comes in the order of rounding."""
        assert self.order is not None
        return self.order.argsort()

    def _with_feedback_noise(self, unit: Tensor) -> Tensor:
        """Adds the expected feedback to values (steps, rows, K), in units of the trellis step."""
        if self.factor is None:
            return unit
        return unit + feedback_noise(self.factor, self.latent.shape).flatten(0, 1)


def feedback_noise(factor: Tensor, shape: torch.Size) -> Tensor:
    """What feedback is expected to add to values of a shape (groups, rows, K), in units of the trellis step.

    When a column is rounded, it has received the rounding errors of those before it, which dominate in quiet columns.
    They are practically random. `factor` is that of each group, or of several weights of one group.
    """
    noise = _noise(shape, factor.device, factor.dtype)
    return noise * ((inherited_variance(factor) / 12).sqrt()[:, None] / FINE_STEP)


def _noise(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random numbers, the same for every weight of a shape."""
    return _drawn(shape, device, dtype) if shape.numel() > KEPT_NOISE else _kept(shape, device, dtype)


def _drawn(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


_kept = lru_cache(maxsize=8)(_drawn)


def round_many(
    problems: Sequence[LayerProblem], steps: Tensor, price: float = HIGH_RATE, trellis: int = 0
) -> tuple[Tensor, Tensor]:
    """Problems of one shape and one group rounded at once, each at its own steps, (problems, steps).

    Codes are (problems, steps, rows, K), errors (problems, steps).
    """
    count = steps.shape[1]
    latent = torch.cat([each.in_order() for each in problems]).repeat_interleave(count, 0)
    steps = steps.to(latent)
    each_step = steps.flatten()[:, None]
    unit = latent / each_step[:, :, None]
    factors = [each.factor for each in problems if each.factor is not None]
    if trellis:
        expected = unit
        if factors:
            noise = feedback_noise(torch.cat(factors), problems[0].latent.shape)
            expected = unit + noise.repeat_interleave(count, 0)
        lengths: TrellisLengths | CodeLengths = fit_trellis(expected, price, trellis)
    else:
        lengths = fit_lengths(unit, price)
    if not factors:
        codes = lengths.round_all(unit)
        errors = (unit - codes).square().sum((1, 2)) * each_step[:, 0].square()
    else:
        codes, left = round_with_feedback(latent, torch.cat(factors), each_step, lengths)
        errors = left.sum(1)
        codes = torch.cat(
            [each.as_were(part) for each, part in zip(problems, codes.split(count), strict=True)]
        )
    return codes.unflatten(0, steps.shape), errors.reshape(steps.shape)


def layer_problem(
    rows: Tensor,
    moments: LayerMoments | None,
    basis: Basis | None = None,
    damping: float = DAMPING,
    ridge: float | None = None,
    reorder: bool = True,
) -> LayerProblem:
    """The rounding problem of a weight (out, K): its best latent is W H B (H')^-1, with H' = B^T H B.

    If compression has changed the layer's inputs, W is first replaced by E[W u' u^T] H^-1, which best
    reproduces the original outputs on the new inputs. There H has a `ridge`, by default the damping; see `held_by`.
    Columns are rounded in the order of `rounding_order`, or, unless `reorder`, from first to last.
    """
    if moments is None:
        return LayerProblem(_to_latent(rows[None].float(), basis), None, basis)
    moments = moments.about_mean(rows)
    second, cross = moments.second, moments.cross
    split = rows.reshape(len(second), -1, rows.shape[1])  # (g, out/g, K)
    dampings = (damping, held_by(damping, ridge, moments))
    latent, factor, order = _pose(split, second, cross, basis, dampings, reorder)
    return LayerProblem(latent, factor, basis, order=order[0])


def layer_problems(
    rows: Tensor,
    moments: Sequence[LayerMoments],
    tile: int = 1,
    damping: float = DAMPING,
    ridge: float | None = None,
    reorder: bool = True,
) -> list[LayerProblem]:
    """The problems of weights of one shape, (layers, out, K), each of one group: few large operations for all."""
    layers, have_same_inputs = len(rows), all(each.second is moments[0].second for each in moments)
    moments = [each.about_mean(weight) for each, weight in zip(moments, rows, strict=True)]
    crosses = [each.cross for each in moments if each.cross is not None]
    # Layers of one shape that are worked on together have seen as many positions.
    dampings = (damping, held_by(damping, ridge, moments[0]))
    basis = None
    if tile == 1 and have_same_inputs:
        # Layers with the same inputs, such as queries and keys, are rows of one problem.
        cross = torch.cat(crosses, 1) if len(crosses) == layers else None
        joined, one, its = _pose(rows.flatten(0, 1)[None], moments[0].second, cross, None, dampings, reorder)
        latent, factor, order = joined.reshape(rows.shape), one.expand(layers, -1, -1), its.expand(layers, -1)
    else:
        second = torch.cat([each.second for each in moments])
        cross = torch.cat(crosses) if len(crosses) == layers else None
        basis = tile_basis(rows, tile, second[:, None]) if tile > 1 else None
        latent, factor, order = _pose(rows, second, cross, basis, dampings, reorder, layers)
    bases = (
        [None] * layers
        if basis is None
        else [Basis(*each) for each in zip(basis.codes, basis.scale, strict=True)]
    )
    # Copies, so that one that is kept does not hold all the others in memory.
    parts = ([each.clone() for each in of_all.split(1)] for of_all in (latent, factor))
    problems = [
        LayerProblem(values, its_factor, its_basis, order=its.clone())
        for values, its_factor, its_basis, its in zip(*parts, bases, order, strict=True)
    ]
    _note_sizes(problems, latent, factor)
    return problems


def held_by(damping: float, ridge: float | None, moments: LayerMoments) -> float:
    """The ridge of a layer: less where there are more than ENOUGH positions for each input, down to the damping.

    The fewer there are, the more a weight that adapts fits the sample and not the data.
    """
    if ridge is None:
        return damping
    inputs = moments.second.shape[-1]
    share = min(1.0, ENOUGH * inputs / moments.positions) if moments.positions else 1.0
    return max(damping, ridge * share)


def _note_sizes(problems: Sequence[LayerProblem], latent: Tensor, factor: Tensor) -> None:
    """What problems would compute of themselves, each waiting for its device, computed at once."""
    found = torch.stack(
        [
            latent.square().mean((1, 2)).sqrt(),
            latent.abs().amax((1, 2)),
            factor.diagonal(dim1=1, dim2=2).pow(-2).mean(1),
        ]
    )
    for problem, (rms, largest, importance) in zip(problems, found.T.tolist(), strict=True):
        vars(problem).update({"largest": largest, "mean_importance": importance})
        if 0.0 < rms < inf:
            vars(problem)["rms"] = rms


def _pose(
    rows: Tensor,
    second: Tensor,
    cross: Tensor | None,
    basis: Basis | None,
    dampings: tuple[float, float],
    reorder: bool,
    layers: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The latent of rows (batch, rows, K), the groups of a layer or several layers, the feedback factor, the order.

    The latent's columns are in their own order, those of the factor in that of rounding, (layers, K).
    `dampings` are that of feedback and the ridge.
    """
    second = second.float()
    damping, held = dampings
    rows = rows.to(second)
    if cross is not None:
        rows = _adapt_to_inputs(rows, second, cross.float(), held, layers)
    in_basis = second if basis is None else _moments_in_basis(second, basis.matrix().to(second))
    if not reorder:
        as_is = torch.arange(in_basis.shape[-1], device=in_basis.device).expand(layers, -1)
        return _to_latent(rows, basis), feedback_factor(in_basis, damping, layers), as_is
    order = rounding_order(in_basis, damping, layers)
    columns = order.repeat_interleave(len(in_basis) // layers, 0)
    in_order = in_basis.take_along_dim(columns[:, :, None], 1).take_along_dim(columns[:, None, :], 2)
    return _to_latent(rows, basis), feedback_factor(in_order, damping, layers), order


def restoring_factor(values: Tensor, codes: Tensor, step: float) -> float:
    """What rounded values are multiplied by so that their part along the original is as long as the original.

    Rounding that prices bits moves values towards zero: what is stored is about (1 - d) of the original, for a
    relative squared error d, and noise. The noise averages out over a layer's many inputs, but the signal is
    smaller for good. |w|^2 / <w, w'> makes it whole, and the noise no larger than MOST_RESTORED allows.
    """
    unit = values / step
    kept = float((unit * codes).sum())
    return min(max(float(unit.square().sum()) / kept, 1.0), MOST_RESTORED) if kept > 0 else 1.0


def row_scales(rows: Tensor) -> Tensor | None:
    """Powers of two near the size of each row, (out, 1), where rows of a weight (out, K) are very unlike in size.

    A step for all rows makes the smallest zero. That is right where the squared error counts, but a norm may
    follow, which makes rows equal. Rows are unlike where a quarter are smaller than the largest by ROW_SPREAD;
    those smaller by DEAD_ROW are zero in practice, and do not count.
    """
    size = (rows / rows.abs().max().clamp_min(1e-37)).float().square().mean(1, keepdim=True).sqrt()
    size = size / size.max().clamp_min(1e-37)
    alive = size[size > DEAD_ROW].sort().values
    if not len(alive) or alive[len(alive) // 4] > ROW_SPREAD:
        return None
    return torch.exp2(size.clamp_min(DEAD_ROW).log2().round())


def scales_of_weights(weights: Tensor) -> Tensor:
    """What rows are divided by so that a squared error counts the same in all, (out, 1): powers of two, once or
    one and a half times, which take few bits in the file."""
    scales = weights.rsqrt()[:, None]
    octave = torch.exp2(scales.log2().floor())
    return octave * torch.where(scales < 1.25 * octave, 1.0, torch.where(scales < 1.75 * octave, 1.5, 2.0))


def tile_basis(rows: Tensor, tile: int, inputs: Tensor | None = None) -> Basis:
    """A quantized basis over the tiles of a weight (out, K), for inputs of these second moments, (groups, L, L).

    With A the mean second moment of a tile of inputs and S that of a tile of weights: C = A^-1/2 V with V
    the eigenvectors of A^1/2 S A^1/2. It makes both diagonal: latents are uncorrelated, and an error in any
    of them adds equally to the output error. Without moments A is the identity and C has the principal
    directions. Weights of several layers, and their moments, have one dimension more.
    """
    tiles = rows.unflatten(-1, (-1, tile)).flatten(-3, -2).double()
    second = tiles.mT @ tiles / tiles.shape[-2]
    half, inverse = _square_roots(second, inputs)
    _, vectors = torch.linalg.eigh(half @ second @ half)
    columns = inverse @ vectors.flip(-1)
    size = (torch.linalg.slogdet(columns).logabsdet / tile).exp()  # det itself may overflow
    columns = columns / size[..., None, None]
    largest = columns.gather(-2, columns.abs().argmax(-2, keepdim=True))
    columns = (
        columns * torch.where(largest < 0, -1.0, 1.0)
    ).float()  # independent of the eigensolver's signs
    scale = storable(columns.abs().amax((-2, -1), keepdim=True) / code_range(CODEBOOK_BITS)[1])
    return Basis(to_codes(columns, scale, CODEBOOK_BITS), scale)


def smooth_inputs(kernel: Sequence[int]) -> Tensor:
    """What to expect of the inputs under a kernel without having seen any: neighbours are alike, (1, k, k)."""
    places = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in kernel))
    places = places.reshape(-1, len(kernel))
    return NEIGHBOURS ** torch.cdist(places, places, p=1.0)[None]


def _square_roots(like: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
    """A^1/2 and A^-1/2, with A the mean diagonal block of the inputs' moments, of the size of `like`."""
    tile = like.shape[-1]
    if second is None:
        eye = torch.eye(tile, dtype=like.dtype, device=like.device)
        return eye, eye
    blocks = second.double().unflatten(-1, (-1, tile)).unflatten(-3, (-1, tile))
    mean = blocks.diagonal(dim1=-4, dim2=-2).mean((-4, -1)).to(like.device)
    values, vectors = torch.linalg.eigh(mean)
    least = (values.amax(-1, keepdim=True) * 1e-3).clamp_min(torch.finfo(torch.float32).tiny)
    values = torch.maximum(values, least)[..., None, :]
    return vectors * values.sqrt() @ vectors.mT, vectors * values.rsqrt() @ vectors.mT


def _adapt_to_inputs(rows: Tensor, second: Tensor, cross: Tensor, held: float, layers: int) -> Tensor:
    """(M + r W)(H + r I)^-1, with M = E[W u' u^T]: the ridge leaves W unchanged in directions without input."""
    level = held * mean_diagonal(second, layers)
    lower, failed = cholesky(second + level, layers)
    if failed.any():
        if layers == 1:
            return rows
        each = zip(rows.chunk(layers), second.chunk(layers), cross.chunk(layers), strict=True)
        return torch.cat([_adapt_to_inputs(*one, held, 1) for one in each])
    wanted = cross + rows * level.diagonal(dim1=1, dim2=2)[:, None]
    # In turn, as they are factored.
    each_of = zip(wanted.transpose(1, 2).chunk(layers), lower.chunk(layers), strict=True)
    return torch.cat([torch.cholesky_solve(*one) for one in each_of]).transpose(1, 2)


def _to_latent(rows: Tensor, basis: Basis | None) -> Tensor:
    if basis is None:
        return rows
    inverse = torch.linalg.inv(basis.matrix().double()).to(rows)
    return _times(rows, inverse.mT)


def _moments_in_basis(second: Tensor, matrix: Tensor) -> Tensor:
    """(I kron C)^T H (I kron C), tile by tile."""
    return _times(_times(second, matrix).transpose(1, 2), matrix).transpose(1, 2)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Each tile of (batch, rows, K) times a matrix, (d, d), or each by that of its layer, (batch, d, d)."""
    tiles = rows.unflatten(-1, (-1, matrix.shape[-1]))
    if matrix.dim() > 2:
        tiles = tiles.flatten(1, 2)
    product: Tensor = tiles @ matrix
    return product.reshape(rows.shape)
