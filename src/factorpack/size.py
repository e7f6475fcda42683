"""Encoded -> bits: the paper's accounting and the real one, by item, kept apart.

The *paper* sizes follow its formula: codes of fixed width, a mask of one bit per code only where a
threshold made extra zeros and the mask pays, FP32 for what stays raw. The *file* sizes are bytes on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from factorpack.kinds import KINDS
from factorpack.record import Encoded

ITEMS = ("codebook", "latent", "mask", "scales", "mean", "values", "header")
"""What a size is made of; `Kind.items` says which item a part counts as."""

# Statistics a batch norm keeps for inference. The paper counts a network's parameters, not these.
_NOT_PARAMETERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One tensor's line of the report."""

    name: str
    kind: str
    shape: tuple[int, ...]
    original_bytes: int
    """Uncompressed, with floats counted as FP32 whatever their type; ratios compare with this."""
    fixed_bits: Mapping[str, int]
    """The paper's fixed-width size, by item."""
    stored_bytes: Mapping[str, int] | None
    """Bytes in the file, by item; None before the tensor has been saved."""
    words: str
    """Rank, bits and sparsity, for a person to read."""
    note: str
    source_bytes: int
    """Uncompressed, in the type that the checkpoint had."""

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
    """All tensors uncompressed, with floats counted as FP32."""
    paper_ratio: float
    file_bytes: int | None = None

    @property
    def source_bytes(self) -> int:
        """All tensors uncompressed, in the types that the checkpoint had."""
        return sum(line.source_bytes for line in self.tensors)

    @property
    def file_ratio(self) -> float | None:
        return self.original_bytes / self.file_bytes if self.file_bytes else None


def size_report(
    tensors: Mapping[str, Encoded],
    part_bytes: Mapping[str, Mapping[str, int]] | None = None,
    file_bytes: int | None = None,
) -> SizeReport:
    """Counts every tensor; `part_bytes` and `file_bytes` are what a saved file takes on disk."""
    header = None
    if part_bytes is not None and file_bytes is not None:
        header = _share_header(part_bytes, file_bytes)
    lines = []
    original, counted, compressed = 0, 0, 0
    for name, encoded in tensors.items():
        stored = None
        if part_bytes is not None and header is not None:
            stored = _by_item(encoded, part_bytes[name])
            stored["header"] += header[name]
        line = _tensor_size(name, encoded, stored)
        lines.append(line)
        original += line.original_bytes
        if encoded.dtype.is_floating_point and not name.endswith(_NOT_PARAMETERS):
            counted += 8 * line.original_bytes
            compressed += sum(line.fixed_bits.values())
    return SizeReport(tuple(lines), original, counted / compressed if compressed else 1.0, file_bytes)


def fp32_bytes(dtype: torch.dtype, numel: int) -> int:
    """What ratios are counted against: floats as FP32, anything else in its own type."""
    return numel * (4 if dtype.is_floating_point else dtype.itemsize)


def fixed_bits(encoded: Encoded) -> dict[str, int]:
    """L_c = d k b_c + k n + (1-r) k n b_z + L_q, item by item."""
    bits = {
        name: part.numel() * encoded.bits.get(name, 8 * part.dtype.itemsize)
        for name, part in encoded.parts.items()
    }
    items = _by_item(encoded, bits)
    name = KINDS[encoded.kind].threshold_part
    if encoded.extra_zeros and name is not None:
        codes = encoded.parts[name]
        masked = int(codes.count_nonzero()) * encoded.bits[name]
        if codes.numel() + masked < bits[name]:
            items["mask"] = codes.numel()
            items[KINDS[encoded.kind].items[name]] += masked - bits[name]
    return items


def words(encoded: Encoded) -> str:
    """What a tensor is stored as, for a person to read."""
    return KINDS[encoded.kind].describe(encoded)


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


def _by_item(encoded: Encoded, by_part: Mapping[str, int]) -> dict[str, int]:
    """Counts by part as counts by item."""
    items, item_of = dict.fromkeys(ITEMS, 0), KINDS[encoded.kind].items
    for part, count in by_part.items():
        items[item_of.get(part, part)] += count
    return items


def _share_header(part_bytes: Mapping[str, Mapping[str, int]], file_bytes: int) -> dict[str, int]:
    """The file's header, shared evenly among the tensors, so that their lines sum to the file."""
    header = file_bytes - sum(sum(parts.values()) for parts in part_bytes.values())
    share, rest = divmod(header, max(len(part_bytes), 1))
    return {name: share + (1 if position < rest else 0) for position, name in enumerate(part_bytes)}
