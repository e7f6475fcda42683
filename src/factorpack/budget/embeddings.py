"""Embeddings: what an error in a row costs, from the gradients at the rows that are looked up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factorpack.budget.sensitivity import Information
from factorpack.record import LayerMoments


def embedding_moments(
    found: Information, rows: int, tied: Sequence[tuple[Tensor, float]] = ()
) -> tuple[LayerMoments, float]:
    """The cost of errors in a table's rows, as if they were a layer's filters, and its sensitivity.

    A row r that is looked up with probability p_r adds p_r e^T G e / 2 to the divergence, where G is the
    Fisher information at the outputs. All rows count as equally likely, p_r = 1 / rows: a few texts contain
    few tokens, and the others must not be spoilt. A head tied to the table adds what it would cost as a layer
    of its own: its inputs' second moments (D, D) times its sensitivity.
    """
    assert found.metric is not None
    cost = found.metric / rows
    for second, level in tied:
        cost = cost + level * second
    level = float(cost.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    return row_moments((cost / level)[None]), level


def row_moments(second: Tensor) -> LayerMoments:
    """The cost of errors in rows, (1, D, D), as moments of inputs whose mean does not matter."""
    nothing = torch.zeros(1, second.shape[-1], device=second.device)
    return LayerMoments(second, nothing, None, nothing)
