"""What a report says about a packed file: plain values and text, gathered before anything is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from factorpack.budget.curves import Curve
from factorpack.budget.norms import folded_norms
from factorpack.errors import PlanError
from factorpack.kinds import KINDS
from factorpack.packed import Packed
from factorpack.printable import printable
from factorpack.report.differences import TensorCheck, verify
from factorpack.report.name_groups import groups_of
from factorpack.size import TensorSize
from factorpack.source import Checkpoint

ITEMS = {
    "latent": "codes",
    "codebook": "codebooks",
    "scales": "scales",
    "mask": "masks",
    "mean": "means",
    "values": "raw values",
    "header": "headers",
}
"""What a stream is called on the page."""
_LEAST_LOSS = 1e-12


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor; errors are None where there was no original to compare with."""

    name: str
    group: str
    kind: str
    shape: tuple[int, ...]
    words: str
    note: str
    original_bytes: int
    bytes: int
    stored_bytes: Mapping[str, int]
    bits: float
    """Stored bits per weight, without the tensor's share of the file's header."""
    zeros: float | None
    error: float | None = None
    """||W - W'|| / ||W||."""
    largest_error: float | None = None
    histogram: tuple[int, ...] = ()
    problem: str = ""
    count: int = 1
    """More where a line sums up several tensors."""


@dataclass(frozen=True, slots=True)
class CurveFacts:
    """What a weight would cost and lose at other sizes; `here` is its bits per weight in this file."""

    name: str
    bits: tuple[float, ...]
    losses: tuple[float, ...]
    here: float
    loss_here: float


@dataclass(frozen=True, slots=True)
class PointFacts:
    """A file of a comparison."""

    method: str
    bytes: int
    ratio: float
    value: float
    settings: str


@dataclass(frozen=True, slots=True)
class ComparisonFacts:
    """Methods at several sizes.

    `measure` says what a point's value is: the share of correct predictions, or of lost energy.
    """

    title: str
    measure: str
    original: float | None
    original_bytes: int
    points: tuple[PointFacts, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything on the page."""

    file: str
    file_bytes: int
    original_bytes: int
    source_bytes: int
    numbers: int
    tensors: tuple[TensorFacts, ...]
    aliases: int
    error: float | None = None
    """||W - W'|| / ||W|| over all coded weights together."""
    curves: tuple[CurveFacts, ...] = ()
    comparisons: tuple[ComparisonFacts, ...] = ()

    @property
    def ratio(self) -> float:
        return self.original_bytes / self.file_bytes

    @property
    def bits(self) -> float:
        """Bits per weight of the whole file, headers included."""
        return 8 * self.file_bytes / max(self.numbers, 1)


def gather(
    packed: Packed,
    original: Checkpoint | None = None,
    curves: Mapping[str, Curve] | None = None,
    comparisons: Sequence[ComparisonFacts] = (),
) -> Facts:
    """Reads a packed file tensor by tensor, and compares it with the original where there is one."""
    report, path = packed.size(), packed.path
    if path is None or report.file_bytes is None:
        raise PlanError("a report describes a file: save the packed model first")
    groups = groups_of({line.name: line.bytes for line in report.tensors})
    checks = {}
    if original is not None:
        checks = {check.name: check for check in verify(packed, original, histograms=True)}
    coded = [
        checks[line.name] for line in report.tensors if line.name in checks and KINDS[line.kind].is_coded
    ]
    folded = folded_norms(packed)
    tensors = tuple(
        _tensor(
            line,
            groups[line.name],
            KINDS[line.kind].zero_share(packed[line.name]),
            checks.get(line.name),
            line.name in folded,
        )
        for line in report.tensors
    )
    return Facts(
        file=printable(Path(path).name),
        file_bytes=report.file_bytes,
        original_bytes=report.original_bytes,
        source_bytes=report.source_bytes,
        numbers=sum(math.prod(line.shape) for line in report.tensors),
        tensors=tensors,
        aliases=len(packed.aliases),
        error=_joint_error(coded),
        curves=_curves(curves, {line.name: line for line in report.tensors}) if curves is not None else (),
        comparisons=tuple(comparisons),
    )


def _tensor(
    line: TensorSize, group: str, zeros: float | None, check: TensorCheck | None, is_folded: bool
) -> TensorFacts:
    stored = {item: count for item, count in (line.stored_bytes or {}).items() if count}
    compared = check if check is not None and (check.norm or not check.problem) else None
    # A folded norm computes the same with other values: its error is reported, and is no problem.
    excused = is_folded and not KINDS[line.kind].is_coded and compared is not None
    return TensorFacts(
        name=printable(line.name),
        group=printable(group),
        kind=line.kind,
        shape=line.shape,
        words=line.words,
        note=printable(line.note),
        original_bytes=line.original_bytes,
        bytes=line.bytes,
        stored_bytes=stored,
        bits=_coded_bits(line),
        zeros=zeros,
        error=compared.relative_error if compared else None,
        largest_error=compared.largest_error if compared else None,
        histogram=check.histogram if check else (),
        problem=printable(check.problem) if check and not excused else "",
    )


def _coded_bits(line: TensorSize) -> float:
    header = (line.stored_bytes or {}).get("header", 0)
    return 8 * (line.bytes - header) / max(math.prod(line.shape), 1)


def _joint_error(checks: Sequence[TensorCheck]) -> float | None:
    """The relative error of all weights as one vector; None where there is nothing to compare."""
    energy = sum(check.norm**2 for check in checks)
    lost = sum((check.relative_error * check.norm) ** 2 for check in checks if check.norm)
    return math.sqrt(lost / energy) if energy else None


def _curves(curves: Mapping[str, Curve], lines: Mapping[str, TensorSize]) -> tuple[CurveFacts, ...]:
    known = {name: curve for name, curve in curves.items() if name in lines}
    if not known:
        raise PlanError("the curves belong to another model: no weight of the file has one")
    return tuple(_curve(name, curve, lines[name]) for name, curve in known.items())


def _curve(name: str, curve: Curve, line: TensorSize) -> CurveFacts:
    ends = len(curve.bytes), len(curve.losses)
    numbers = [curve.numel, *curve.bytes, *curve.losses]
    if ends[0] != ends[1] or not ends[0] or not all(map(_is_number, numbers)) or curve.numel <= 0:
        raise PlanError(
            f"the curve of {name!r} has {ends} bytes and losses, expected the same count of finite numbers"
        )
    pairs = sorted(zip(curve.bytes, curve.losses, strict=True))
    bits = tuple(8 * count / curve.numel for count, _ in pairs)
    losses = tuple(max(loss, 0.0) for _, loss in pairs)
    here = _coded_bits(line)
    # Linear in the logarithm, as curves are drawn.
    loss_here = np.exp(np.interp(here, bits, np.log(np.maximum(losses, _LEAST_LOSS))))
    return CurveFacts(printable(name), bits, losses, here, float(loss_here))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
