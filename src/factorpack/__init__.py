"""factorpack: trained PyTorch models, many times smaller, in one safe file.

>>> import factorpack as fp
>>> packed = fp.compress(model, fp.QSPCA(rank=128, latent_bits=3))  # doctest: +SKIP
>>> fp.save(packed, "model.packed.safetensors")  # doctest: +SKIP
>>> model.load_state_dict(fp.load("model.packed.safetensors").state_dict())  # doctest: +SKIP
"""

from factorpack.calibrate import calibrate
from factorpack.comparison import compare
from factorpack.decode import decode
from factorpack.errors import FactorpackError, FormatError, PlanError, SourceError, WeightError
from factorpack.hub import from_pretrained, register, save_pretrained
from factorpack.methods import (
    AQ,
    BGD,
    LSQ,
    PQF,
    QSPCA,
    SVD,
    TTQ,
    VQ,
    ABCNet,
    Keep,
    NNCodec,
    Prune,
    Scalar,
    SecondOrder,
    SpatialSVD,
)
from factorpack.model import Packed, compress, compress_to, export, load, save
from factorpack.onnx import export_onnx
from factorpack.plan.planner import Planner
from factorpack.preview import plan
from factorpack.record import Encoded
from factorpack.solve.projected import ProjectedGradient
from factorpack.tune.finetune import Schedule, finetune
from factorpack.tune.reconstruct import reconstruct
from factorpack.version import __version__

__all__ = [
    "AQ",
    "BGD",
    "LSQ",
    "PQF",
    "QSPCA",
    "SVD",
    "TTQ",
    "VQ",
    "ABCNet",
    "Encoded",
    "FactorpackError",
    "FormatError",
    "Keep",
    "NNCodec",
    "Packed",
    "PlanError",
    "Planner",
    "ProjectedGradient",
    "Prune",
    "Scalar",
    "Schedule",
    "SecondOrder",
    "SourceError",
    "SpatialSVD",
    "WeightError",
    "__version__",
    "calibrate",
    "compare",
    "compress",
    "compress_to",
    "decode",
    "export",
    "export_onnx",
    "finetune",
    "from_pretrained",
    "load",
    "plan",
    "reconstruct",
    "register",
    "save",
    "save_pretrained",
]
