"""Closing a gap to a size exactly: codes that lose least become cheaper ones; rows of zeros go."""

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
"""A parameter -> how much a loss bends in each of its numbers: Adam's second moments are an estimate."""


def trim(rows: Sequence[QuantizedRows], bits: float, curvature: Curvature | None = None) -> int:
    """Moves codes one step towards cheaper ones until about `bits` are saved; returns how many it moved.

    First those whose squared rounding error grows least for each bit it saves: weighted by the curvature
    of the loss where that is known, else in units of their own scales.
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
    """What moving each code would cost a bit saved, the bits it would save, and where it would go."""
    codes, unit = rows.codes().float(), rows.unit()
    table, _ = fit_table(codes, rows.bits)
    cheaper = table.cheaper(codes)
    saving = table.at(codes) - table.at(cheaper)
    worse = (unit - cheaper).square() - (unit - codes).square()
    bend = curvature(rows.numbers) if curvature is not None else None
    if bend is not None:
        worse = worse * bend * rows.a_code().square()
    movable = cheaper != codes if rows.mask is None else (cheaper != codes) & rows.mask.bool()
    return torch.where(movable, worse / saving, torch.inf), saving, cheaper


def without_dead_rows(encoded: Encoded) -> Encoded:
    """Factors less the rows of the latent, or columns of the codebook, that are zero: a lower rank.

    The weight is the same, since all that goes is terms of zero. One row is always kept.
    """
    if not KINDS[encoded.kind].is_product:
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
