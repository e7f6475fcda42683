"""The methods that are compared, each with its settings in the order of the files they make."""

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
"""Not a method but the budget planner, which needs no ladder: it meets a size by itself."""


@dataclass(frozen=True, slots=True)
class Opponent:
    """A method's settings from the smallest file to the largest, in ladders along which files grow."""

    title: str
    ladders: Sequence[Sequence[Method]]
    permutes: bool = False
    """Whether channels are put in another order first, which changes no answer."""


def _powers(low: int, high: int) -> list[int]:
    return [1 << power for power in range(low, high + 1)]


def _codewords(make: Callable[..., Method]) -> list[list[Method]]:
    """Codewords of whole kernels, then of smaller tiles: many codewords of a few numbers make large files."""
    kernels = [[make(codewords=k, regime=regime) for k in _powers(3, 11)] for regime in ("large", "small")]
    return [*kernels, *([make(codewords=k, tile=tile) for k in _powers(4, 12)] for tile in (4, 2))]


def _between(low: float, high: float, count: int) -> list[float]:
    """Numbers from `low` to `high`, each the same factor from the next."""
    return [low * (high / low) ** (place / (count - 1)) for place in range(count)]


_ALGORITHM_1 = ProjectedGradient(steps=100, stop="validation")
_RANKS = [4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256]

OPPONENTS: dict[str, Opponent] = {
    "qspca": Opponent(
        "the paper's QSPCA",
        [
            [QSPCA(rank, bits, clip="minmax", solver=_ALGORITHM_1) for rank in _RANKS]
            for bits in (3, 4, 5, 6, 8)
        ],
    ),
    "scalar": Opponent("rounding to nearest", [[Scalar(bits) for bits in range(2, 9)]]),
    "second_order": Opponent("error feedback, fixed width", [[SecondOrder(bits=b) for b in range(2, 9)]]),
    "lsq": Opponent("LSQ", [[LSQ(bits) for bits in range(1, 9)]]),
    "ttq": Opponent("TTQ", [[TTQ(share) for share in (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)]]),
    "abcnet": Opponent("ABC-Net", [[ABCNet(bases) for bases in range(1, 6)]]),
    "prune": Opponent(
        "magnitude pruning", [[Prune(1 - share, bits=4) for share in _between(0.005, 1.0, 48)]]
    ),
    "nncodec": Opponent("NNCodec-like", [[NNCodec(step) for step in reversed(_between(0.01, 8.0, 96))]]),
    "svd": Opponent("SVD", [[SVD(share=share) for share in _between(0.005, 1.0, 48)]]),
    "spatial_svd": Opponent("spatial SVD", [[SpatialSVD(share=share) for share in _between(0.005, 1.0, 48)]]),
    "vq": Opponent("VQ", _codewords(VQ)),
    "bgd": Opponent("BGD", _codewords(BGD)),
    "pqf": Opponent("PQF", _codewords(PQF), permutes=True),
    "aq": Opponent("AQ", [[AQ(codebooks, k) for k in _powers(2, 9)] for codebooks in (2, 4)]),
}


def chosen(names: Sequence[str]) -> list[str]:
    """Names of opponents, the planner first; "all" is all of them."""
    known = [PLANNED, *OPPONENTS]
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise PlanError(f"unknown method {(unknown or [''])[0]!r}, known are all, {', '.join(known)}")
    return known if "all" in names else [name for name in known if name in names]


def for_sizing(method: Method) -> Method:
    """The same settings with as little work as tells how large the file will be."""
    if isinstance(method, VQ | BGD | PQF | AQ):
        return replace(method, iterations=1)
    return without_data(method)


def without_data(method: Method) -> Method:
    """The method as far as it goes on the weights alone."""
    return replace(method, solver=None) if isinstance(method, QSPCA) else method
