"""Does a packed file still stand for the weights it was made from?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from factorpack.decode import decode
from factorpack.model import Packed
from factorpack.record import Encoded
from factorpack.source import Source, open_source


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """How far a decoded tensor is from the original; `problem` is empty where all is well."""

    name: str
    relative_error: float
    """||W - W'|| / ||W||, in the Frobenius norm."""
    largest_error: float
    problem: str = ""


def verify(packed: Packed, against: str | Path | None = None) -> Iterator[TensorCheck]:
    """Decodes every tensor, and compares it with the original checkpoint's where there is one."""
    source = open_source(against) if against is not None else None
    originals = _names(source) if source is not None else {}
    for name in (*packed, *packed.aliases):
        encoded = packed[name]
        weight = decode(encoded)
        if source is None:
            yield TensorCheck(name, 0.0, 0.0)
        elif name not in originals:
            yield TensorCheck(name, 0.0, 0.0, "not in the original")
        else:
            yield _compare(name, weight, source.entries[originals[name]].load(), encoded)
    for name in sorted(set(originals) - {*packed, *packed.aliases}):
        yield TensorCheck(name, 0.0, 0.0, "not in the packed file")


def _names(source: Source) -> dict[str, str]:
    return {**{name: name for name in source.entries}, **source.aliases}


def _compare(name: str, weight: Tensor, original: Tensor, encoded: Encoded) -> TensorCheck:
    if weight.shape != original.shape or weight.dtype != original.dtype:
        found, expected = (f"{value.dtype} {tuple(value.shape)}" for value in (weight, original))
        return TensorCheck(name, 0.0, 0.0, f"is {found}, the original {expected}")
    if encoded.kind == "keep" and encoded.parts["values"].dtype == original.dtype:
        same = _bits(weight).equal(_bits(original))
        return TensorCheck(name, 0.0, 0.0, "" if same else "kept raw, yet differs")
    difference = weight.double() - original.double()
    norm, lost = float(original.double().norm()), float(difference.norm())
    relative = lost / norm if norm else (float("inf") if lost else 0.0)
    largest = float(difference.abs().max()) if difference.numel() else 0.0
    # Worse than storing nothing at all: no method does that to the weights it was given.
    return TensorCheck(name, relative, largest, "unrelated to the original" if relative > 1.0 else "")


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
