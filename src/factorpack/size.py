"""Encoded -> bits: the paper's accounting and the real one, itemised, never confused.

The *paper* numbers follow its formula: fixed-width codes, a mask of one bit an entry only where a
threshold made extra zeros and only where the mask pays, FP32 for what stays raw. The *file* numbers
are bytes on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from factorpack.record import THRESHOLDED, Encoded, dtype_name

ITEMS = ("codebook", "latent", "mask", "scales", "mean", "values", "header")
_ITEM_OF_PART = {
    "codes": "latent",
    "indices": "latent",
    "scale": "scales",
    "levels": "scales",
    "codebook_scale": "scales",
    "latent_scale": "scales",
    "value": "values",
}

_MULTIPLIED = {"factors": "latent", "spatial": "latent", "scalar": "codes"}
"""The part whose codes are numbers to multiply, by kind."""

# Statistics a batch norm keeps for inference. The paper counts a network's parameters, not these.
_NOT_PARAMETERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One tensor's line of the report."""

    name: str
    kind: str
    shape: tuple[int, ...]
    original_bytes: int
    """Its bytes in FP32; an integer tensor's own bytes."""
    fixed_bits: Mapping[str, int]
    """The paper's fixed-width size, by item."""
    stored_bytes: Mapping[str, int] | None
    """Bytes in the file, by item; None before the tensor has been saved."""
    words: str
    """Rank, bits and sparsity in plain words."""
    note: str
    source_bytes: int
    """Its bytes in the type it came in."""

    @property
    def bytes(self) -> int:
        """Bytes in the file, or at fixed width before there is one."""
        if self.stored_bytes is None:
            return sum(self.fixed_bits.values()) // 8
        return sum(self.stored_bytes.values())


@dataclass(frozen=True, slots=True)
class SizeReport:
    """What `packed.size()` returns. `file_bytes` and `file_ratio` are None before saving."""

    tensors: tuple[TensorSize, ...]
    original_bytes: int
    paper_ratio: float
    file_bytes: int | None = None

    @property
    def source_bytes(self) -> int:
        return sum(line.source_bytes for line in self.tensors)

    @property
    def file_ratio(self) -> float | None:
        return self.original_bytes / self.file_bytes if self.file_bytes else None


def size_report(
    tensors: Mapping[str, Encoded],
    part_bytes: Mapping[str, Mapping[str, int]] | None = None,
    file_bytes: int | None = None,
) -> SizeReport:
    """Counts every tensor; `part_bytes` and `file_bytes` are what a saved file really takes."""
    stored = None
    if part_bytes is not None and file_bytes is not None:
        stored = _itemised(part_bytes, file_bytes)
    lines = []
    original, counted, compressed = 0, 0, 0
    for name, encoded in tensors.items():
        line = _tensor_size(name, encoded, stored[name] if stored is not None else None)
        lines.append(line)
        original += line.original_bytes
        if encoded.dtype.is_floating_point and not name.endswith(_NOT_PARAMETERS):
            counted += 8 * line.original_bytes
            compressed += sum(line.fixed_bits.values())
    return SizeReport(tuple(lines), original, counted / compressed if compressed else 1.0, file_bytes)


def fp32_bytes(dtype: torch.dtype, numel: int) -> int:
    """What ratios are counted against: floats in FP32, anything else in its own type."""
    return numel * (4 if dtype.is_floating_point else dtype.itemsize)


def fixed_bits(encoded: Encoded) -> dict[str, int]:
    """L_c = d k b_c + k n + (1-r) k n b_z + L_q, item by item."""
    items = dict.fromkeys(ITEMS, 0)
    for name, part in encoded.parts.items():
        width = encoded.bits.get(name, 8 * part.dtype.itemsize)
        items[_ITEM_OF_PART.get(name, name)] += part.numel() * width
    if encoded.extra_zeros:
        name = THRESHOLDED[encoded.kind]
        codes = encoded.parts[name]
        masked = int(codes.count_nonzero()) * encoded.bits[name]
        if codes.numel() + masked < items["latent"]:
            items["mask"], items["latent"] = codes.numel(), masked
    return items


def words(encoded: Encoded) -> str:
    """What a tensor got, as a person would say it."""
    if encoded.kind == "keep":
        return f"kept as {dtype_name(encoded.parts['values'].dtype)}"
    if encoded.kind == "constant":
        return "one value everywhere"
    if encoded.kind == "levels":
        return f"{encoded.parts['levels'].shape[1]} levels"
    if encoded.kind == "codewords":
        stages, (rows, tile) = len(encoded.parts["indices"]), encoded.parts["codebook"].shape
        books = f"{stages} x " if stages > 1 else ""
        return f"{books}{rows // stages} codewords of {tile} numbers, {encoded.bits['indices']} bits"
    name = _MULTIPLIED[encoded.kind]
    scale = "scale" if encoded.kind == "scalar" else "latent_scale"
    codes, bits = encoded.parts[name], encoded.bits[name]
    if encoded.parts[scale].numel() == 1:  # the width is then that of the layer's largest number
        bits = code_width(int(codes.min()), int(codes.max()))
    text = f"{bits} bits, {zero_share(encoded):.0%} zeros{', trellis' if encoded.trellis else ''}"
    if encoded.kind == "scalar":
        return text
    rank = int(codes.any(1).count_nonzero())
    return f"rank {rank} of {len(encoded.parts['codebook'])}, {text}"


def zero_share(encoded: Encoded) -> float | None:
    """The share of codes that are zero; None for kinds whose codes are not multiplied, so that zero is no less."""
    codes = encoded.parts.get(_MULTIPLIED.get(encoded.kind, ""))
    return None if codes is None else 1.0 - int(codes.count_nonzero()) / max(codes.numel(), 1)


def code_width(low: int, high: int) -> int:
    """Bits that signed codes from `low` to `high` need."""
    return 1 + max(value.bit_length() for value in (max(high, 0), -min(low, -1) - 1))


def _tensor_size(name: str, encoded: Encoded, stored: Mapping[str, int] | None) -> TensorSize:
    return TensorSize(
        name,
        encoded.kind,
        encoded.shape,
        fp32_bytes(encoded.dtype, encoded.numel),
        fixed_bits(encoded),
        stored,
        words(encoded),
        encoded.note,
        encoded.dtype.itemsize * encoded.numel,
    )


def _itemised(part_bytes: Mapping[str, Mapping[str, int]], file_bytes: int) -> dict[str, dict[str, int]]:
    """Stored bytes by item. The file's header is shared out evenly, so that the lines sum to the file."""
    header = file_bytes - sum(sum(parts.values()) for parts in part_bytes.values())
    share, rest = divmod(header, max(len(part_bytes), 1))
    stored = {}
    for position, (name, parts) in enumerate(part_bytes.items()):
        items = dict.fromkeys(ITEMS, 0)
        for part, count in parts.items():
            items[_ITEM_OF_PART.get(part, part)] += count
        items["header"] += share + (1 if position < rest else 0)
        stored[name] = items
    return stored
