"""Solvers: factors, codes and codebooks that minimise a weight's or a layer's error."""
