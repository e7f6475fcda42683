"""Solvers: from a tile matrix to good factors."""
