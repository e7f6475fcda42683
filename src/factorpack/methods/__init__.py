"""Compression methods: frozen dataclasses whose fields are their settings, each making an `Encoded`."""

from __future__ import annotations

from factorpack.methods.abcnet import ABCNet
from factorpack.methods.aq import AQ
from factorpack.methods.bgd import BGD
from factorpack.methods.keep import Keep
from factorpack.methods.lsq import LSQ
from factorpack.methods.method import Method, from_fields
from factorpack.methods.pqf import PQF
from factorpack.methods.prune import Prune
from factorpack.methods.qspca import QSPCA
from factorpack.methods.rdoq import RDOQ
from factorpack.methods.scalar import Scalar
from factorpack.methods.second_order import SecondOrder
from factorpack.methods.spatial_svd import SpatialSVD
from factorpack.methods.svd import SVD
from factorpack.methods.ttq import TTQ
from factorpack.methods.vq import VQ
from factorpack.solve.projected import ProjectedGradient

METHODS: dict[str, type[Method]] = {
    "qspca": QSPCA,
    "scalar": Scalar,
    "second_order": SecondOrder,
    "lsq": LSQ,
    "ttq": TTQ,
    "abcnet": ABCNet,
    "prune": Prune,
    "rdoq": RDOQ,
    "svd": SVD,
    "spatial_svd": SpatialSVD,
    "vq": VQ,
    "bgd": BGD,
    "pqf": PQF,
    "aq": AQ,
    "keep": Keep,
}
"""Every method, by the name that recipes and the command line use. A new method joins here."""

__all__ = [
    "AQ",
    "BGD",
    "LSQ",
    "METHODS",
    "PQF",
    "QSPCA",
    "RDOQ",
    "SVD",
    "TTQ",
    "VQ",
    "ABCNet",
    "Keep",
    "Method",
    "ProjectedGradient",
    "Prune",
    "Scalar",
    "SecondOrder",
    "SpatialSVD",
    "from_fields",
]
