"""Quantizers: real numbers to small signed integers times a scale, and back."""
