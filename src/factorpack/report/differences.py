"""Does a packed file still represent the weights it was made from?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from factorpack.decoding import decode
from factorpack.kinds import KINDS
from factorpack.packed import Packed
from factorpack.record import Encoded
from factorpack.source import Checkpoint, Source, open_source

BINS = 41
"""Bins of an error histogram: an odd number, so that the middle one lies around zero."""
BIN_WIDTH = 0.05
"""Width of such a bin, in standard deviations of the original weight."""


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """How far a decoded tensor is from the original; `problem` is empty where there is none."""

    name: str
    relative_error: float
    """||W - W'|| / ||W||, in the Frobenius norm."""
    largest_error: float
    problem: str = ""
    norm: float = 0.0
    """||W||, where there was an original to compare with."""
    histogram: tuple[int, ...] = ()
    """Counts of elements by error, see `error_histogram`; empty where it was not requested."""


def verify(
    packed: Packed, against: Checkpoint | None = None, *, key: str | None = None, histograms: bool = False
) -> Iterator[TensorCheck]:
    """Decodes every tensor, and compares it with the original checkpoint's where there is one.

    `key` names the weights in a torch file that has several.
    """
    source = _open_original(packed, against, key) if against is not None else None
    originals = _names(source) if source is not None else {}
    for name in (*packed, *packed.aliases):
        encoded = packed[name]
        weight = decode(encoded)
        if source is None:
            yield TensorCheck(name, 0.0, 0.0)
        elif name not in originals:
            yield TensorCheck(name, 0.0, 0.0, "not in the original")
        else:
            yield _compare(name, weight, source.entries[originals[name]].load(), encoded, histograms)
    for name in sorted(set(originals) - {*packed, *packed.aliases}):
        yield TensorCheck(name, 0.0, 0.0, "not in the packed file")


def _open_original(packed: Packed, against: Checkpoint, key: str | None) -> Source:
    """A checkpoint under the names that the packed file has, where wrappers have added to either."""
    source = open_source(against, key)
    return (
        source.fitted({*packed, *packed.aliases}, str(against)).say()
        if isinstance(against, str | Path)
        else source
    )


def _names(source: Source) -> dict[str, str]:
    return {**{name: name for name in source.entries}, **source.aliases}


def error_histogram(original: Tensor, difference: Tensor) -> tuple[int, ...]:
    """Errors counted in BINS bins around zero; the outermost two include all larger errors.

    Empty where errors have no unit or are not finite: a weight whose elements are all equal, or NaN.
    """
    deviation = float(original.double().std(correction=0)) if original.numel() else 0.0
    if not 0.0 < deviation < float("inf") or not difference.isfinite().all():
        return ()
    half = BINS // 2
    places = (difference.double() / (BIN_WIDTH * deviation)).round().clamp(-half, half).long() + half
    return tuple(torch.bincount(places.flatten(), minlength=BINS).tolist())


def _compare(name: str, weight: Tensor, original: Tensor, encoded: Encoded, histograms: bool) -> TensorCheck:
    if weight.shape != original.shape or weight.dtype != original.dtype:
        found, expected = (f"{value.dtype} {tuple(value.shape)}" for value in (weight, original))
        return TensorCheck(name, 0.0, 0.0, f"is {found}, the original {expected}")
    if KINDS[encoded.kind].is_raw and encoded.parts["values"].dtype == original.dtype:
        same = _bits(weight).equal(_bits(original))
        return TensorCheck(name, 0.0, 0.0, "" if same else "kept raw, yet differs")
    difference = weight.double() - original.double()
    norm, lost = float(original.double().norm()), float(difference.norm())
    relative = lost / norm if norm else (float("inf") if lost else 0.0)
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    # Worse than storing zeros: no method does that.
    problem = "unrelated to the original" if relative > 1.0 else ""
    counts = error_histogram(original, difference) if histograms else ()
    return TensorCheck(name, relative, largest, problem, norm, counts)


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
