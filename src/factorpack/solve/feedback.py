"""Rounding with error feedback: later columns compensate for each column's rounding error.

For the output error tr(E H E^T) of a weight error E, take U upper triangular with U^T U = H^-1. Rounding
column j leaves e_j = (w_j - q_j s) / U_jj, and e_j U_j,: is subtracted from the columns after it; in the end
tr(E H E^T) = sum_j ||e_j||^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from factorpack.solve.code_length import CodeLengths, free_lengths
from factorpack.solve.trellis_search import TrellisLengths

BLOCK, TRELLIS_BLOCK = 128, 32
"""Columns between two products; along a trellis on a GPU fewer: there the kernel takes longer for feedback."""
SOLVED = 256
"""Triangular matrices of this size are inverted by solving."""
NARROW = 8
"""Columns that are rounded one after the other without a product between them."""


class ColumnRounding(Protocol):
    """Rounds a column of values, in units of the step, to codes."""

    def __call__(self, column: int, values: Tensor) -> Tensor:
        """Integers, as floats, for the `values` of column `column`: (elements, rows of all their batches)."""
        ...


def round_to_nearest(column: int, values: Tensor) -> Tensor:  # noqa: ARG001
    return values.round()


@dataclass(frozen=True, slots=True)
class Nearest:
    """Rounds to the nearest of the codes from `low` to `high`."""

    low: int
    high: int

    def __call__(self, column: int, values: Tensor) -> Tensor:  # noqa: ARG002
        return values.round().clamp_(self.low, self.high)


def feedback_factor(second: Tensor, damping: float = 0.01, layers: int = 1) -> Tensor:
    """U of (batch, K, K) second moments, upper triangular, U^T U = (H + damping mean(diag H) I)^-1.

    Damping keeps directions that are rare in the sample from being ignored. The batch may be that of several
    `layers`, which do not depend on one another.
    """
    level = mean_diagonal(second, layers)
    for attempt in (damping, 10 * damping, 100 * damping, 1.0):
        # The Cholesky factor of H with reversed rows and columns is the inverse of U reversed alike.
        lower, failed = cholesky((second + attempt * level).flip(-1, -2), layers)
        if not failed.any():
            break
        if layers > 1:
            return torch.cat([feedback_factor(each, damping) for each in second.chunk(layers)])
    return inverse_of_lower(lower).flip(-1, -2).contiguous()


def rounding_order(second: Tensor, damping: float = 0.01, layers: int = 1) -> Tensor:
    """The order in which a layer's columns are rounded, the same in all its groups: (layers, K).

    In the end the error is the sum of 1 / U_jj^2 over the columns, whose product does not depend on the order:
    the more alike they are, the smaller it is. The first column's is the variance that its input has when all
    others are known, 1 / (H^-1)_jj, and the last one's is all the variance of its input. So the columns come
    first whose inputs the others tell least about.
    """
    inverse = feedback_factor(second, damping, layers).square().sum(1)
    alone = inverse.reciprocal().unflatten(0, (layers, -1)).mean(1)
    order: Tensor = alone.argsort(dim=1, descending=True, stable=True)
    return order


def cholesky(matrices: Tensor, layers: int = 1) -> tuple[Tensor, Tensor]:
    """Cholesky factors of (batch, K, K), and where there are none. Those of several layers are found in turn.

    A GPU's routine for many matrices is slower than the one for a single large matrix.
    """
    if layers == 1:
        lower, failed = torch.linalg.cholesky_ex(matrices)
        return lower, failed
    found = [torch.linalg.cholesky_ex(each) for each in matrices.chunk(layers)]
    return torch.cat([lower for lower, _ in found]), torch.cat([failed for _, failed in found])


def inverse_of_lower(lower: Tensor) -> Tensor:
    """The inverse of (batch, K, K) lower triangular matrices, by halves: a third of the work of solving for it.

    [[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]].
    """
    size = lower.shape[-1]
    if size <= SOLVED:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        solved: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
        return solved
    half = size // 2
    first, last = inverse_of_lower(lower[:, :half, :half]), inverse_of_lower(lower[:, half:, half:])
    found = torch.zeros_like(lower)
    found[:, :half, :half], found[:, half:, half:] = first, last
    found[:, half:, :half] = last @ (lower[:, half:, :half] @ first).neg_()
    return found


def mean_diagonal(second: Tensor, layers: int = 1) -> Tensor:
    """The mean of each moment matrix's diagonal, times the identity: (batch, K, K)."""
    level = second.diagonal(dim1=-2, dim2=-1).mean(-1)
    # A group whose inputs are all zero still needs a ridge, far below its neighbours' in the same layer.
    groups = level.unflatten(0, (layers, -1))
    least = (1e-4 * groups.mean(1, keepdim=True).double()).clamp_min(1e-30).to(level)
    level = torch.maximum(groups, least).flatten()
    return torch.diag_embed(level[:, None].expand(-1, second.shape[-1]))


def inherited_variance(factor: Tensor) -> Tensor:
    """The variance each column has received from earlier rounding errors of unit variance: (batch, K).

    Column i's error, w_i - q_i s, reaches column j scaled by U_ij / U_ii.
    """
    shares = factor.triu(1) / factor.diagonal(dim1=1, dim2=2)[:, :, None]
    return shares.square_().sum(1)


def round_with_feedback(
    target: Tensor, factor: Tensor, step: Tensor, rounding: ColumnRounding = round_to_nearest
) -> tuple[Tensor, Tensor]:
    """Codes for (batch, rows, K) values, and the output error of each row: (batch, rows).

    `factor` is (elements, K, K): each is for as many consecutive batch elements. `step` broadcasts over
    (batch, rows). Codes are integers stored as floats.
    """
    batch, rows, size = target.shape
    left = target.reshape(len(factor), -1, size).clone()
    step = step.expand(batch, rows).reshape(left.shape[:2]).contiguous()
    codes = torch.empty_like(left)
    error = left.new_zeros(left.shape[:2])
    width = TRELLIS_BLOCK if left.is_cuda and isinstance(rounding, TrellisLengths) else BLOCK
    for start in range(0, size, width):
        stop = min(start + width, size)
        code, residues = _round_block(left[:, :, start:stop], factor, start, step, rounding)
        codes[:, :, start:stop] = code
        error += residues.square().sum(-1)
        left[:, :, stop:] -= residues @ factor[:, start:stop, stop:]
    return codes.reshape(target.shape), error.reshape(batch, rows)


def _round_block(
    block: Tensor, factor: Tensor, start: int, step: Tensor, rounding: ColumnRounding
) -> tuple[Tensor, Tensor]:
    """Codes of a block of columns, from `start` on, and their residues e_j."""
    if block.is_cuda and isinstance(rounding, CodeLengths | Nearest):
        from factorpack.solve.feedback_triton import round_block  # triton is there only with a GPU

        if isinstance(rounding, CodeLengths):
            return round_block(block, factor, start, step, rounding)
        free = free_lengths(len(block), block.shape[1], factor.shape[-1], block.device)
        return round_block(block, factor, start, step, free, (rounding.low, rounding.high))
    if block.is_cuda and isinstance(rounding, TrellisLengths):
        from factorpack.solve.trellis_triton import round_block as round_block_of_paths

        return round_block_of_paths(block, factor, start, step, rounding)
    stop = start + block.shape[2]
    return _round_columns(block.contiguous(), factor[:, start:stop, start:stop], start, step, rounding)


def _round_columns(
    block: Tensor, local: Tensor, first: int, step: Tensor, rounding: ColumnRounding
) -> tuple[Tensor, Tensor]:
    """The same on any device: the left half, its feedback into the right half as one product, the right half."""
    width = block.shape[2]
    if width > NARROW:
        half = width // 2
        left = _round_columns(block[:, :, :half], local[:, :half, :half], first, step, rounding)
        rest = block[:, :, half:] - left[1] @ local[:, :half, half:]
        right = _round_columns(rest, local[:, half:, half:], first + half, step, rounding)
        return torch.cat([left[0], right[0]], 2), torch.cat([left[1], right[1]], 2)
    columns = list(block.unbind(2))
    codes, residues = [], []
    for index, column in enumerate(columns):
        code = rounding(first + index, column / step)
        residue = (column - code * step) / local[:, index, index, None]
        codes.append(code)
        residues.append(residue)
        for later in range(index + 1, width):
            columns[later] = columns[later] - residue * local[:, index, later, None]
    return torch.stack(codes, 2), torch.stack(residues, 2)
