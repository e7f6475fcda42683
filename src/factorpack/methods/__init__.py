"""Compression methods: frozen dataclasses whose fields are their settings, each making an `Encoded`."""

from __future__ import annotations

from factorpack.methods.keep import Keep
from factorpack.methods.protocol import Method, from_fields, samples_of
from factorpack.methods.qspca import QSPCA
from factorpack.methods.scalar import Scalar
from factorpack.methods.second_order import SecondOrder

METHODS: dict[str, type[Method]] = {
    "qspca": QSPCA,
    "scalar": Scalar,
    "second_order": SecondOrder,
    "keep": Keep,
}
"""Every method, by the name recipes and the command line use."""

__all__ = ["METHODS", "QSPCA", "Keep", "Method", "Scalar", "SecondOrder", "from_fields", "samples_of"]
