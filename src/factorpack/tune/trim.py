"""Closes a gap to a size exactly: the codes that lose least move to cheaper ones; rows of zeros are removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from factorpack.kinds import KINDS
from factorpack.record import Encoded
from factorpack.tune.rate import fit_table
from factorpack.tune.trainable import QuantizedRows

Curvature = Callable[[Tensor], Tensor | None]
"""A parameter -> the curvature of the loss in each element, estimated by Adam's second moments."""


def trim(rows: Sequence[QuantizedRows], bits: float, curvature: Curvature | None = None) -> int:
    """Moves codes one step towards cheaper ones until about `bits` are saved; returns how many it moved.

    Codes whose squared rounding error grows least per bit saved move first; errors are weighted by the
    curvature of the loss if it is known, else they are in units of the codes' own scales.
    """
    with torch.no_grad():
        moves = [_moves(each, curvature) for each in rows]
        costs = torch.cat([cost.reshape(-1) for cost, _, _ in moves])
        savings = torch.cat([saving.reshape(-1) for _, saving, _ in moves])
        order = costs.argsort(stable=True)
        movable = int(costs.isfinite().sum())
        enough = int((savings[order].double().cumsum(0) < bits).sum()) + 1
        chosen = torch.zeros_like(costs, dtype=torch.bool)
        chosen[order[: min(enough, movable)]] = True
        start = 0
        for each, (cost, _, cheaper) in zip(rows, moves, strict=True):
            moved = chosen[start : start + cost.numel()].reshape(cost.shape)
            start += cost.numel()
            if bool(moved.any()):
                each.put(moved, cheaper)
    return min(enough, movable)


def _moves(rows: QuantizedRows, curvature: Curvature | None) -> tuple[Tensor, Tensor, Tensor]:
    """The cost of moving each code per bit saved, the bits it saves, and its new code."""
    codes, unit = rows.codes().float(), rows.unit()
    table, _ = fit_table(codes, rows.bits)
    cheaper = table.cheaper(codes)
    saving = table.at(codes) - table.at(cheaper)
    worse = (unit - cheaper).square() - (unit - codes).square()
    weight = curvature(rows.numbers) if curvature is not None else None
    if weight is not None:
        worse = worse * weight * rows.a_code().square()
    movable = cheaper != codes if rows.mask is None else (cheaper != codes) & rows.mask.bool()
    return torch.where(movable, worse / saving, torch.inf), saving, cheaper


def remove_dead_rows(encoded: Encoded) -> Encoded:
    """Factors of lower rank, without zero rows of the latent and zero columns of the codebook.

    The weight is unchanged, as the removed terms are zero. One row is always kept.
    """
    if not KINDS[encoded.kind].is_product or encoded.trellis:  # a path runs through all rows
        return encoded
    parts = dict(encoded.parts)
    alive = parts["latent"].any(1) & parts["codebook"].any(0)  # (k,)
    if bool(alive.all()):
        return encoded
    if not bool(alive.any()):
        alive[0] = True
    rank = len(alive)
    parts["latent"], parts["codebook"] = parts["latent"][alive], parts["codebook"][:, alive].contiguous()
    if parts["latent_scale"].shape[0] == rank:
        parts["latent_scale"] = parts["latent_scale"][alive]
    if parts["codebook_scale"].shape[1] == rank:
        parts["codebook_scale"] = parts["codebook_scale"][:, alive].contiguous()
    zeros = parts["latent"].numel() - int(parts["latent"].count_nonzero())
    return replace(encoded, parts=parts, extra_zeros=min(encoded.extra_zeros, zeros))
