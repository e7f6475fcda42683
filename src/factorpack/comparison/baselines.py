"""The compared methods, each with ladders of settings ordered by file size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from factorpack.errors import PlanError
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
    Method,
    NNCodec,
    Prune,
    Scalar,
    SecondOrder,
    SpatialSVD,
)
from factorpack.solve.projected import ProjectedGradient

PLANNED = "planned"
"""The budget planner, which is no method and needs no ladder: it takes the size itself."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A method's settings, in ladders from the smallest file to the largest."""

    title: str
    ladders: Sequence[Sequence[Method]]
    permutes: bool = False
    """Whether channels are reordered first, which leaves the model's outputs unchanged."""


def _powers(low: int, high: int) -> list[int]:
    return [1 << power for power in range(low, high + 1)]


def _codewords(make: Callable[..., Method]) -> list[list[Method]]:
    """Codewords of whole kernels, then of smaller tiles: many short codewords make large files."""
    kernels = [[make(codewords=k, regime=regime) for k in _powers(3, 11)] for regime in ("large", "small")]
    return [*kernels, *([make(codewords=k, tile=tile) for k in _powers(4, 12)] for tile in (4, 2))]


def _geometric(low: float, high: float, count: int) -> list[float]:
    """Geometrically spaced values from `low` to `high`."""
    return [low * (high / low) ** (index / (count - 1)) for index in range(count)]


_ALGORITHM_1 = ProjectedGradient(steps=100, stop="validation")
_RANKS = [4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256]

BASELINES: dict[str, Baseline] = {
    "qspca": Baseline(
        "the paper's QSPCA",
        [
            [QSPCA(rank, bits, clip="minmax", solver=_ALGORITHM_1) for rank in _RANKS]
            for bits in (3, 4, 5, 6, 8)
        ],
    ),
    "scalar": Baseline("rounding to nearest", [[Scalar(bits) for bits in range(2, 9)]]),
    "second_order": Baseline("error feedback, fixed width", [[SecondOrder(bits=b) for b in range(2, 9)]]),
    "lsq": Baseline("LSQ", [[LSQ(bits) for bits in range(1, 9)]]),
    "ttq": Baseline("TTQ", [[TTQ(share) for share in (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)]]),
    "abcnet": Baseline("ABC-Net", [[ABCNet(bases) for bases in range(1, 6)]]),
    "prune": Baseline(
        "magnitude pruning", [[Prune(1 - share, bits=4) for share in _geometric(0.005, 1.0, 48)]]
    ),
    "nncodec": Baseline("NNCodec-like", [[NNCodec(step) for step in reversed(_geometric(0.01, 8.0, 96))]]),
    "svd": Baseline("SVD", [[SVD(share=share) for share in _geometric(0.005, 1.0, 48)]]),
    "spatial_svd": Baseline(
        "spatial SVD", [[SpatialSVD(share=share) for share in _geometric(0.005, 1.0, 48)]]
    ),
    "vq": Baseline("VQ", _codewords(VQ)),
    "bgd": Baseline("BGD", _codewords(BGD)),
    "pqf": Baseline("PQF", _codewords(PQF), permutes=True),
    "aq": Baseline("AQ", [[AQ(codebooks, k) for k in _powers(2, 9)] for codebooks in (2, 4)]),
}


def select_methods(names: Sequence[str]) -> list[str]:
    """Checks method names and puts them in order, the planner first; "all" means every method."""
    known = [PLANNED, *BASELINES]
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise PlanError(f"unknown method {(unknown or [''])[0]!r}, known are all, {', '.join(known)}")
    return known if "all" in names else [name for name in known if name in names]


def for_sizing(method: Method) -> Method:
    """The same settings with the least work that still gives the file's size."""
    if isinstance(method, VQ | BGD | PQF | AQ):
        return replace(method, iterations=1)
    return without_data(method)


def without_data(method: Method) -> Method:
    """The method as it runs on the weights alone."""
    return replace(method, solver=None) if isinstance(method, QSPCA) else method
