"""factorpack: trained PyTorch models, many times smaller, in one safe file.

>>> import factorpack as fp
>>> packed = fp.compress(model, fp.QSPCA(rank=128, latent_bits=3))  # doctest: +SKIP
>>> fp.save(packed, "model.packed.safetensors")  # doctest: +SKIP
>>> model.load_state_dict(fp.load("model.packed.safetensors").state_dict())  # doctest: +SKIP

All other methods are in `fp.methods`; `fp.hub`, `fp.onnx`, `fp.gguf`, `fp.tune` and `fp.engine` hold what
their names say. Names are imported when they are first used: a reader of files never pays for the compressor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from factorpack.errors import FactorpackError, FormatError, PlanError, SourceError, WeightError
from factorpack.version import __version__

if TYPE_CHECKING:
    from factorpack import engine as engine
    from factorpack import gguf as gguf
    from factorpack import hub as hub
    from factorpack import methods as methods
    from factorpack import onnx as onnx
    from factorpack import tune as tune
    from factorpack.budget.planner import Planner
    from factorpack.budget.preview import plan
    from factorpack.comparison import compare
    from factorpack.compression import compress
    from factorpack.methods import QSPCA, Keep, Scalar, SecondOrder
    from factorpack.packed import Packed, load, save
    from factorpack.tune.schedule import Schedule
    from factorpack.tune.training import finetune

__all__ = [
    "QSPCA",
    "FactorpackError",
    "FormatError",
    "Keep",
    "Packed",
    "PlanError",
    "Planner",
    "Scalar",
    "Schedule",
    "SecondOrder",
    "SourceError",
    "WeightError",
    "__version__",
    "compare",
    "compress",
    "finetune",
    "load",
    "plan",
    "save",
]

_HOMES = {
    "QSPCA": "methods",
    "Keep": "methods",
    "Packed": "packed",
    "Planner": "budget.planner",
    "Scalar": "methods",
    "Schedule": "tune.schedule",
    "SecondOrder": "methods",
    "compare": "comparison",
    "compress": "compression",
    "finetune": "tune.training",
    "load": "packed",
    "plan": "budget.preview",
    "save": "packed",
}
"""Where each name that is imported when it is first used comes from."""
_MODULES = ("engine", "gguf", "hub", "methods", "onnx", "tune")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"factorpack.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'factorpack' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"factorpack.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
