"""Compares methods on one model at equal sizes: real files, measured accuracy, a table and a figure."""

from __future__ import annotations

from factorpack.comparison.baselines import BASELINES, PEERS, PLANNED
from factorpack.comparison.grid import Grid, compare
from factorpack.comparison.point import Point

__all__ = ["BASELINES", "PEERS", "PLANNED", "Grid", "Point", "compare"]
