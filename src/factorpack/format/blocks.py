"""A matrix of symbols <-> one block for each model: rows and columns sorted by class, and back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from factorpack.format.classes import Classes, Classing
from factorpack.format.symbols import Codes, Symbols, count_values

_SLAB = 1 << 18
"""Codes whose columns are reordered at a time, so that they stay in a core's cache."""


def places(classing: Classing, models: int) -> list[list[tuple[slice, slice]]]:
    """For each model, where its codes lie once rows and columns are sorted by class, row classes ascending."""
    found: list[list[tuple[slice, slice]]] = [[] for _ in range(models)]
    for row, (top, bottom) in enumerate(pairwise(_bounds(classing.rows))):
        for column, (left, right) in enumerate(pairwise(_bounds(classing.columns))):
            if top < bottom and left < right:
                found[row + column].append((slice(top, bottom), slice(left, right)))
    return found


def to_blocks(symbols: Symbols, classing: Classing) -> list[Symbols]:
    """The symbols of each model of a matrix, (r, n), in the order in which they are coded."""
    tops, lefts = _bounds(classing.rows), _bounds(classing.columns)
    sizes = np.convolve(np.diff(tops), np.diff(lefts)).tolist()
    blocks = [np.empty(size, symbols.dtype) for size in sizes]
    rows, columns = (np.argsort(classes, kind="stable") for classes in (classing.rows, classing.columns))
    at, height = [0] * len(blocks), max(1, _SLAB // max(len(columns), 1))
    for row, (top, bottom) in enumerate(pairwise(tops)):
        for start in range(top, bottom, height):
            slab = symbols[rows[start : min(start + height, bottom)]]
            slab = slab.take(columns, 1) if len(lefts) > 2 else slab
            for model, (left, right) in enumerate(pairwise(lefts), row):
                end = at[model] + len(slab) * (right - left)
                blocks[model][at[model] : end].reshape(len(slab), -1)[:] = slab[:, left:right]
                at[model] = end
    return blocks


def to_matrix(ordered: Codes, classing: Classing) -> Codes:
    """The inverse of sorting a matrix's rows and columns by class."""
    if not classing.rows.any() and not classing.columns.any():
        return ordered
    rows, columns = (np.argsort(classes, kind="stable") for classes in (classing.rows, classing.columns))
    matrix = np.empty_like(ordered)
    if len(columns) > _SLAB:  # ranks would take eight more bytes per column
        for row, own in zip(rows, ordered, strict=True):
            matrix[row][columns] = own
        return matrix
    ranks = np.argsort(columns)
    height = max(1, _SLAB // max(len(ranks), 1))
    for top in range(0, len(rows), height):
        matrix[rows[top : top + height]] = ordered[top : top + height].take(ranks, 1)
    return matrix


def _bounds(classes: Classes) -> list[int]:
    """Where each class begins, once sorted, and the end."""
    return [0, *np.cumsum(count_values(classes, 1)).tolist()]
