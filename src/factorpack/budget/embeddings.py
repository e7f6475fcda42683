"""Embeddings and heads: what an error in a row costs, from gradients at what is looked up or predicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from factorpack.budget.sensitivity import Information
from factorpack.record import LayerMoments

RARE = 0.1
"""The share of all that matters which is spread evenly over words: texts to come have others."""


def word_weights(information: Tensor) -> tuple[Tensor, float]:
    """How much errors in the rows of a table of words, or of a head, count; and how much all of them do.

    The Fisher information of a row, of `information` (V,), is about proportional to how likely its word is: a
    common word matters thousands of times more than a rare one. Weights are the roots of it, half-way on a
    logarithmic scale to rows that are all alike, because other texts have other words. With an error of
    1 / weight in each row, the second result is what that costs on these texts, beside what the same error would
    if all rows were alike.
    """
    share = information.double() / information.double().mean().clamp_min(torch.finfo(torch.float32).tiny)
    weights = ((1 - RARE) * share + RARE).sqrt()
    return weights.float(), float((share / weights).mean())


def word_information(table: Information | None, head: Information, inputs: Tensor | None) -> Tensor:
    """The Fisher information of rows: of a head alone, or of the table of its words with it.

    With the second moments of the head's `inputs`, (D, D), the head is tied to the table, and both add up.
    Without, each counts a half: a head knows all words, a few texts do not have them.
    """
    assert head.rows is not None
    if table is None or table.rows is None:
        return head.rows
    if inputs is not None:
        return table.rows + head.rows * float(inputs.trace())
    least = torch.finfo(torch.float32).tiny
    return table.rows / table.rows.sum().clamp_min(least) + head.rows / head.rows.sum().clamp_min(least)


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
