"""Second-order rounding of one layer: one step for all its codes, in a basis over its tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from factorpack.quantize.uniform import code_range, from_codes, storable, to_codes
from factorpack.record import LayerMoments
from factorpack.solve.code_length import HIGH_RATE, CodeLengths, fit_lengths
from factorpack.solve.feedback import feedback_factor, ridge, round_with_feedback, taken_over
from factorpack.solve.trellis_search import FINE_STEP, TrellisLengths, fit_trellis

CODEBOOK_BITS = 8
DAMPING = 0.03


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """C, quantized: every tile of d numbers is C times d latents."""

    codes: Tensor
    """(d, d), int8, and one scale for all, (1, 1)."""
    scale: Tensor

    def matrix(self) -> Tensor:
        return from_codes(self.codes, self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A layer ready to be rounded at any step: its best real latent, and what an error in it costs."""

    latent: Tensor
    """(groups, rows, K)."""
    factor: Tensor | None
    """U of feedback.py, (groups, K, K); None where nothing is known of the inputs."""
    basis: Basis | None

    def importance(self) -> Tensor:
        """What a squared error in each column adds to the output error once fed back: (groups, K)."""
        if self.factor is None:
            return self.latent.new_ones(len(self.latent), self.latent.shape[2])
        return self.factor.diagonal(dim1=1, dim2=2).pow(-2)

    def round(self, steps: Tensor, price: float = HIGH_RATE, trellis: int = 0) -> tuple[Tensor, Tensor]:
        """Codes (steps, groups, rows, K) for some steps, (steps,), and the output error of each, (steps,).

        A bit is worth `price` squared steps of error. With the states of a `trellis` the codes are a path
        through it, and a step is FINE_STEP of the plain one that the price is in.
        """
        count = len(steps)
        groups, rows, size = self.latent.shape
        steps = steps.to(self.latent)
        latent = self.latent.repeat(count, 1, 1)
        # Few numbers teach little about code lengths: the groups of a depthwise layer share theirs.
        unit = latent.reshape(count, groups * rows, size) / steps[:, None, None]
        if trellis:
            lengths: TrellisLengths | CodeLengths = fit_trellis(self._foreseen(unit), price, trellis)
        else:
            lengths = fit_lengths(unit, price)
        if self.factor is None:
            codes = lengths.all(unit)
            error = (unit - codes).square().sum((1, 2)) * steps.square()
            return codes.reshape(count, groups, rows, size), error
        codes, left = round_with_feedback(
            latent,
            self.factor.repeat(count, 1, 1),
            steps.repeat_interleave(groups)[:, None],
            lengths if isinstance(lengths, TrellisLengths) else lengths.by_group(groups),
        )
        return codes.reshape(count, groups, rows, size), left.reshape(count, -1).sum(1)

    def _foreseen(self, unit: Tensor) -> Tensor:
        """Numbers (steps, rows, K), in steps of a path, as loud as rounding will meet them.

        By then each column has taken over rounding errors of those before it, which in quiet columns are
        most of what there is to code. They are as good as random.
        """
        if self.factor is None:
            return unit
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(self.latent.shape, generator=generator).to(unit)
        noise *= (taken_over(self.factor) / 12).sqrt()[:, None] / FINE_STEP
        return unit + noise.flatten(0, 1)


def layer_problem(
    rows: Tensor, moments: LayerMoments | None, basis: Basis | None = None, damping: float = DAMPING
) -> Problem:
    """The problem of a weight (out, K): W H B (H')^-1 is its best latent, H' = B^T H B what it meets.

    Where the inputs have changed since, W gives way first to the weight that answers the new inputs as
    W did the old ones, W E[u' u^T] H^-1.
    """
    if moments is None:
        return Problem(_to_latent(rows[None].float(), basis), None, basis)
    second = moments.second.float()
    groups = len(second)
    split = rows.reshape(groups, -1, rows.shape[1]).to(second)  # (g, out/g, K)
    if moments.cross is not None:
        split = _adapted(split, second, moments.cross.float(), damping)
    turned = second if basis is None else _turned(second, basis.matrix().to(second))
    return Problem(_to_latent(split, basis), feedback_factor(turned, damping), basis)


def tile_basis(rows: Tensor, tile: int, moments: LayerMoments | None = None) -> Basis:
    """A basis over the tiles of a weight (out, K), quantized.

    With A the mean second moment of a tile of inputs and S that of a tile of weights: C = A^-1/2 V with V
    the eigenvectors of A^1/2 S A^1/2. In it both are diagonal, so that latents do not correlate and an
    error in any of them costs the same output. Without moments A is the identity and C the principal
    directions.
    """
    tiles = rows.reshape(-1, tile).double()
    spread = tiles.T @ tiles / len(tiles)
    half, inverse = _roots(spread, moments)
    _, vectors = torch.linalg.eigh(half @ spread @ half)
    columns = inverse @ vectors.flip(1)
    columns = columns / (torch.linalg.slogdet(columns).logabsdet / tile).exp()  # a determinant overflows
    largest = columns.gather(0, columns.abs().argmax(0, keepdim=True))
    columns = (columns * torch.where(largest < 0, -1.0, 1.0)).float()  # whatever signs the eigensolver has
    scale = storable((columns.abs().max() / code_range(CODEBOOK_BITS)[1]).reshape(1, 1))
    return Basis(to_codes(columns, scale, CODEBOOK_BITS), scale)


def _roots(spread: Tensor, moments: LayerMoments | None) -> tuple[Tensor, Tensor]:
    """A^1/2 and A^-1/2 of the mean diagonal block of the inputs' moments."""
    tile = len(spread)
    if moments is None:
        eye = torch.eye(tile, dtype=spread.dtype, device=spread.device)
        return eye, eye
    groups, size, _ = moments.second.shape
    blocks = moments.second.double().reshape(groups, size // tile, tile, size // tile, tile)
    mean = blocks.diagonal(dim1=1, dim2=3).mean((0, 3)).to(spread.device)
    values, vectors = torch.linalg.eigh(mean)
    values = values.clamp_min(values.max() * 1e-3).clamp_min(torch.finfo(torch.float32).tiny)
    return vectors * values.sqrt() @ vectors.T, vectors * values.rsqrt() @ vectors.T


def _adapted(rows: Tensor, second: Tensor, cross: Tensor, damping: float) -> Tensor:
    """W (M + r I)(H + r I)^-1: the ridge leaves W alone in directions that the inputs do not show."""
    level = damping * ridge(second)
    lower, failed = torch.linalg.cholesky_ex(second + level)
    if failed.any():
        return rows
    answer: Tensor = torch.cholesky_solve((rows @ (cross + level)).transpose(1, 2), lower).transpose(1, 2)
    return answer


def _to_latent(rows: Tensor, basis: Basis | None) -> Tensor:
    if basis is None:
        return rows
    inverse = torch.linalg.inv(basis.matrix().double()).to(rows)
    tile = len(inverse)
    latent: Tensor = (rows.unflatten(-1, (-1, tile)) @ inverse.T).flatten(-2)
    return latent


def _turned(second: Tensor, matrix: Tensor) -> Tensor:
    """(I kron C)^T H (I kron C), tile by tile."""
    tile = len(matrix)
    right = (second.unflatten(-1, (-1, tile)) @ matrix).flatten(-2)
    left = right.transpose(1, 2)
    turned: Tensor = (left.unflatten(-1, (-1, tile)) @ matrix).flatten(-2).transpose(1, 2)
    return turned
