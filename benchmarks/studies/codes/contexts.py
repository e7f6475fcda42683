"""What contexts of neighbouring codes save over the format's stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.studies.codes.weights import Matrix, Point, Weight, rounded
from factorpack.format.stream_plan import best_plan
from factorpack.format.streams import split_of
from factorpack.format.symbols import to_symbols
from factorpack.solve.code_length import HIGH_RATE

RATIOS = np.array([0.5, 0.75, 1.0, 1.33, 2.0])
"""Edges between quiet and loud neighbourhoods, relative to what their classes expect."""
CONTEXTS = ("rdo + magnitude contexts", "rdo + sign contexts", "rdo + both contexts", "rdo, adaptive alone")


def context_curves(weights: list[Weight], steps: list[float], plain: list[Point]) -> dict[str, list[Point]]:
    saved = {name: np.zeros(len(steps)) for name in CONTEXTS}
    for weight in weights:
        for number, at in enumerate(steps):
            for name, bits in _context_savings(weight, rounded(weight, at, HIGH_RATE)).items():
                saved[name][number] += bits
    return {
        name: [(b - float(s) / 8, e) for (b, e), s in zip(plain, bits, strict=True)]
        for name, bits in saved.items()
    }


def _context_savings(weight: Weight, codes: NDArray[np.float32]) -> dict[str, float]:
    """Bits that contexts of neighbours save in the stream, their counts starting at the tables sent.

    The last one is a coder with no tables and no classes at all: it expects magnitudes from the row and the
    column so far, and its counts start at a geometric law.
    """
    encoded = weight.encoded(codes, 1.0)
    name = "latent" if "latent" in encoded.parts else "codes"
    split, tile = split_of(encoded, name), weight.tile
    matrix = encoded.parts[name].numpy()
    low, order, symbols = to_symbols(matrix)
    plan, total_bits, bits = best_plan(symbols, len(order), split)
    model = plan.classing.rows[:, None] + plan.classing.columns
    if tile > 1:  # back from the view, (s, n/s * k), or from the tiles, (k, n), to channels
        model = (model if plan.split else model.T).reshape(codes.shape)
    whole = codes.astype(np.int64)
    number = np.empty(len(order), np.int64)
    number[order.astype(np.int64) - low] = np.arange(len(order))
    symbol = number[whole - low]
    tables = np.maximum(plan.tables(total_bits)[2], 2.0**-8)
    law = tables / tables.sum(1, keepdims=True)
    now = float(-np.log2(law[model, symbol]).sum())
    loud, signs = _neighbours(whole, model, tile)
    saved = {}
    for label, context, count in (
        (CONTEXTS[0], loud, len(RATIOS) + 1),
        (CONTEXTS[1], signs, 9),
        (CONTEXTS[2], loud * 9 + signs, 9 * (len(RATIOS) + 1)),
    ):
        cell = model * count + context
        saved[label] = now - _adaptive_bits(cell, symbol, np.repeat(law, count, 0), 64.0)
    cell = _expected(np.abs(whole))
    laws = _geometric(2.0 ** (np.arange(int(cell.max()) + 1) / 3 - 5), order)
    saved[CONTEXTS[3]] = bits - _adaptive_bits(cell, symbol, laws, 8.0)
    return saved


def _neighbours(codes: Matrix, model: Matrix, tile: int) -> tuple[Matrix, Matrix]:
    """How loud the codes before are relative to what their classes expect, and the signs of the nearest two."""
    size = np.abs(codes)
    total = np.bincount(model.ravel(), size.ravel()) / np.maximum(np.bincount(model.ravel()), 1)
    relative = size / np.maximum(total, 0.02)[model]
    places = [(1, 0, 1.0), (2, 0, 0.5), (0, tile, 1.0), (0, 2 * tile, 0.5)]
    places += [(0, 1, 1.0), (0, 2, 0.5)] if tile > 1 else [(1, 1, 0.5)]
    above = sum(weight * _moved(relative, down, right, 1.0) for down, right, weight in places)
    loud = np.digitize(above / sum(weight for _, _, weight in places), RATIOS)
    signs = 3 * (np.sign(_moved(codes, 1, 0, 0)) + 1) + np.sign(_moved(codes, 0, tile, 0)) + 1
    return loud, signs.astype(np.int64)


def _moved(matrix: NDArray[Any], down: int, right: int, fill: float) -> NDArray[Any]:
    rows, columns = matrix.shape
    found = np.full_like(matrix, fill)
    found[down:, right:] = matrix[: max(rows - down, 0), : max(columns - right, 0)]
    return found


def _expected(size: Matrix) -> Matrix:
    """The magnitude that row and column predict, from the codes before in both, in thirds of an octave."""
    above = np.cumsum(size, 0) - size
    mean = max(float(size.mean()), 0.01)
    column = (above + 2 * mean) / (np.arange(len(size))[:, None] + 2)
    before, predicted = np.cumsum(size, 1) - size, np.cumsum(column, 1) - column
    scale = (before + 4 * mean) / (predicted + 4 * mean)
    level: Matrix = np.rint(3 * (np.log2(column * scale) + 5)).clip(0, 40).astype(np.int64)
    return level


def _geometric(mean: NDArray[np.float64], order: Matrix) -> NDArray[np.float64]:
    """The two-sided law with each mean magnitude, (laws, symbols)."""
    decay = (np.sqrt(1 + mean**2) - 1) / mean
    law: NDArray[np.float64] = decay[:, None] ** np.abs(order.astype(np.float64)) + 1e-9
    return law / law.sum(1, keepdims=True)


def _adaptive_bits(cell: Matrix, symbol: Matrix, law: NDArray[np.float64], weight: float) -> float:
    """Bits of symbols coded with counts per cell that start at `weight` times its law, in any order."""
    cells, size = law.shape
    counts = np.bincount((cell * size + symbol).ravel(), minlength=cells * size).reshape(cells, size)
    start, seen = torch.from_numpy(weight * law), torch.from_numpy(counts.astype(np.float64))
    each = torch.lgamma(start + seen) - torch.lgamma(start)
    whole = torch.lgamma(weight + seen.sum(1)) - torch.lgamma(torch.tensor(weight, dtype=torch.float64))
    return float((whole.sum() - each.sum()) / np.log(2))
