"""Quantizers: real values to small signed integers times a scale, and back."""
