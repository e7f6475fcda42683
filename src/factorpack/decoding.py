"""Encoded -> weight, and the rules that its parts must keep: every kind does its own."""

from __future__ import annotations

import torch
from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds import KINDS
from factorpack.kinds.base import PartSpec, Specs
from factorpack.record import Encoded
from factorpack.tiles import Layout


def decode(encoded: Encoded) -> Tensor:
    """The weight, in its own dtype and shape."""
    kind = KINDS[encoded.kind]
    if _gains_by_slices(encoded):
        weight = torch.empty(encoded.shape, dtype=encoded.dtype)
        kind.decode_into(encoded, weight)
        return weight
    kind.check_indices(encoded)
    return kind.decode(encoded)


def _gains_by_slices(encoded: Encoded) -> bool:
    """Whether a core's cache helps, and every slice has the bits that it has in the whole: sums may differ."""
    if any(part.device.type != "cpu" or part.requires_grad for part in encoded.parts.values()):
        return False
    found = specs(encoded)
    kind, shapes = KINDS[encoded.kind], {name: spec.shape for name, spec in found.items()}
    return not kind.operations(encoded.shape, found) and len(kind.cut(encoded.layout, shapes)) > 1


def decode_into(encoded: Encoded, weight: Tensor) -> None:
    """`decode` into a contiguous tensor of its shape, slice by slice, converted to that tensor's type."""
    KINDS[encoded.kind].decode_into(encoded, weight)


def rebuild(encoded: Encoded) -> Tensor:
    """`decode` without `check_indices`, which has passed before: no step depends on a value, so it can be traced."""
    return KINDS[encoded.kind].decode(encoded)


def check_indices(encoded: Encoded) -> None:
    """Raises FormatError where a code is an index outside its table."""
    KINDS[encoded.kind].check_indices(encoded)


def check(kind: str, layout: Layout, dtype: torch.dtype, parts: Specs) -> None:
    """Raises FormatError unless the parts are those `kind` needs for a weight of this layout and type."""
    if kind not in KINDS:
        raise FormatError(f"unknown kind {kind!r}, known are {', '.join(KINDS)}")
    shape, groups = layout.shape, layout.transposed_groups
    if groups and (len(shape) < 3 or groups < 0 or shape[0] % groups):
        raise FormatError(f"shape {shape} is not a transposed convolution of {groups} groups")
    KINDS[kind].check(layout, dtype, parts)


def specs(encoded: Encoded) -> dict[str, PartSpec]:
    """The specs of parts that are already in memory."""
    return {
        name: PartSpec(tuple(part.shape), part.dtype, encoded.bits.get(name, 0))
        for name, part in encoded.parts.items()
    }
