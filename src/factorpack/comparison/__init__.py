"""Every method on one model at the same sizes: real files, measured accuracy, one table and one figure."""

from __future__ import annotations

from factorpack.comparison.grid import Grid, Point, compare
from factorpack.comparison.opponents import COMPARED, PLANNED

__all__ = ["COMPARED", "PLANNED", "Grid", "Point", "compare"]
