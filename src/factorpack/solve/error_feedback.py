"""Second-order rounding: column by column, each column's error fed into the columns not yet rounded.

With H = E[u u^T] over a layer's inputs and U the upper Cholesky factor of H^-1, rounding column j of W
by e_j and correcting the later columns by -e_j U_j,: / U_jj leaves an output error of
sum_j e_j^2 / U_jj^2. So the best step for column j at a given rate is proportional to U_jj.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_CODE = 127


def feedback_factor(hessian: Tensor, damping: float = 0.01) -> Tensor:
    """U with U^T U = (H + damping mean(diag H) I)^-1, upper triangular, float64: (K, K)."""
    wide = hessian.double()
    ridge = damping * wide.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    damped = wide + ridge * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    # Reversing rows and columns turns the lower factor of H into the upper factor of H^-1 in one inverse.
    lower = torch.linalg.cholesky(damped.flip(0, 1))
    inverse: Tensor = torch.linalg.solve_triangular(
        lower, torch.eye(len(wide), dtype=wide.dtype, device=wide.device), upper=False
    )
    return inverse.flip(0, 1).contiguous()


def round_with_feedback(
    target: Tensor,
    factor: Tensor,
    step: Tensor,
    lengths: Tensor | None = None,
    rate_weight: float = 0.0,
    block: int = 128,
) -> Tensor:
    """Codes of a weight (out, K) in steps (K,): (K, out) int8.

    With `lengths`, (K, 2 LARGEST_CODE + 1), the bits of each code in each column, a code is chosen by
    (v - q)^2 + `rate_weight` bits(q), v being the number in steps, among the nearest code and those
    between it and zero that are one step or all the way.
    """
    rows = target.T.clone()  # (K, out): a column of the weight is a row here, so that it lies together
    upper = factor.to(rows.dtype)
    codes = torch.empty_like(rows, dtype=torch.int8)
    for start in range(0, len(rows), block):
        end = min(start + block, len(rows))
        errors = torch.empty_like(rows[start:end])
        for j in range(start, end):
            scaled = rows[j] / step[j]
            code = _choose(scaled, None if lengths is None else lengths[j], rate_weight)
            codes[j] = code.to(torch.int8)
            error = (rows[j] - code * step[j]) / upper[j, j]
            errors[j - start] = error
            if j + 1 < end:
                rows[j + 1 : end].addr_(upper[j, j + 1 : end], error, alpha=-1)
        if end < len(rows):
            rows[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1)
    return codes


def _choose(scaled: Tensor, lengths: Tensor | None, rate_weight: float) -> Tensor:
    nearest = scaled.round().clamp_(-LARGEST_CODE, LARGEST_CODE)
    if lengths is None or rate_weight == 0.0:
        return nearest
    smaller = nearest - nearest.sign()
    best, best_cost = nearest, _cost(scaled, nearest, lengths, rate_weight)
    for candidate in (smaller, torch.zeros_like(nearest)):
        cost = _cost(scaled, candidate, lengths, rate_weight)
        better = cost < best_cost
        best, best_cost = torch.where(better, candidate, best), torch.where(better, cost, best_cost)
    return best


def _cost(scaled: Tensor, code: Tensor, lengths: Tensor, rate_weight: float) -> Tensor:
    return (scaled - code).square() + rate_weight * lengths[(code + LARGEST_CODE).long()]
