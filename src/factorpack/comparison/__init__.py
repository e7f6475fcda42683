"""Compares methods on one model at equal sizes: real files, measured accuracy, a table and a figure."""

from __future__ import annotations

from factorpack.comparison.baselines import BASELINES, PLANNED
from factorpack.comparison.grid import Grid, Point, compare

__all__ = ["BASELINES", "PLANNED", "Grid", "Point", "compare"]
