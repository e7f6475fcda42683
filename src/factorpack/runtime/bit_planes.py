"""Codes of any width in bytes, and the operator that unpacks them.

A file's bit string suits a reader that goes from front to back. Here the bits of a code are cut into planes
of 8, 4, 2 or 1 bits. The fields of a byte are a stride apart in the plane, so that one shift unpacks a
contiguous run of codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from factorpack.quantize.uniform import code_dtype


def planes(bits: int) -> tuple[int, ...]:
    """The widths a code of `bits` is cut into, its lowest bits first.

    >>> planes(3), planes(8), planes(13)
    ((2, 1), (8,), (8, 4, 1))
    """
    widths = [8] * (bits // 8)
    return (*widths, *(width for width in (4, 2, 1) if bits % 8 & width))


def bit_plane_bytes(count: int, bits: int) -> int:
    """What `pack_codes` makes of `count` codes."""
    return sum(_plane_bytes(count, width) for width in planes(bits))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Signed codes of any shape, int8 or, above 8 bits, int16 -> bytes, in memory order."""
    flat = codes.reshape(-1)
    flat = flat.view(torch.uint8) if flat.dtype == torch.int8 else flat
    packed, shift = [], 0
    for width in planes(bits):
        numbers = ((flat >> shift) & ((1 << width) - 1)).to(torch.uint8)
        slots, stride = 8 // width, _plane_bytes(len(flat), width)
        plane = numbers[:stride].clone()
        for slot in range(1, slots):
            later = numbers[slot * stride : (slot + 1) * stride]
            plane[: len(later)] |= later << (slot * width)
        packed.append(plane)
        shift += width
    return torch.cat(packed)


def unpack_reference(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack_codes`, in plain torch: (count,), int8 or, above 8 bits, int16."""
    return _joined(packed, bits, count, lambda plane, width: _plane(plane, width, count))


def unpack_range(packed: Tensor, bits: int, count: int, start: int, stop: int) -> Tensor:
    """Codes `start` to `stop` - 1 of `count`, without unpacking the others: (stop - start,)."""
    return _joined(packed, bits, count, lambda plane, width: _plane_range(plane, width, start, stop))


def unpack_at(packed: Tensor, bits: int, count: int, places: Tensor) -> Tensor:
    """Codes at positions from 0 to `count` - 1, of any shape, without unpacking the others."""
    return _joined(packed, bits, count, lambda plane, width: _plane_at(plane, width, places))


def _joined(packed: Tensor, bits: int, count: int, fields_of: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Signed codes from the fields that `fields_of` takes from each plane, given its width."""
    dtype = code_dtype(bits)
    total: Tensor | None = None
    start = shift = 0
    for width in planes(bits):
        size = _plane_bytes(count, width)
        numbers = fields_of(packed[start : start + size], width)
        if dtype != torch.int8:
            numbers = numbers.to(dtype)
        total = numbers << shift if total is None else total.bitwise_or_(numbers << shift)
        start, shift = start + size, shift + width
    assert total is not None
    codes = total.view(dtype)
    if bits == 8 * dtype.itemsize:
        return codes
    sign = 1 << (bits - 1)
    return (codes ^ sign) - sign


@torch.library.custom_op("factorpack::unpack_codes", mutates_args=())
def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """`unpack_reference` as one operator: a compiler neither inlines it nor folds the codes into weights."""
    return unpack_reference(packed, bits, count)


@unpack_codes.register_fake
def _(packed: Tensor, bits: int, count: int) -> Tensor:
    return packed.new_empty(count, dtype=code_dtype(bits))


def _plane_bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


def _plane(packed: Tensor, width: int, count: int) -> Tensor:
    if width == 8:
        return packed
    places = width * torch.arange(8 // width, device=packed.device, dtype=torch.uint8)
    return ((packed >> places[:, None]) & ((1 << width) - 1)).reshape(-1)[:count]


def _plane_range(packed: Tensor, width: int, start: int, stop: int) -> Tensor:
    if width == 8:
        return packed[start:stop]
    stride = len(packed)
    runs = [
        (packed[max(start - first, 0) : min(stop - first, stride)] >> (first // stride * width))
        for first in range(start // stride * stride, stop, stride)
    ]
    return (runs[0] if len(runs) == 1 else torch.cat(runs)).bitwise_and_((1 << width) - 1)


def _plane_at(packed: Tensor, width: int, places: Tensor) -> Tensor:
    if width == 8:
        return packed[places]
    stride = len(packed)
    shifts = (places // stride * width).to(torch.uint8)
    return (packed[places % stride] >> shifts) & ((1 << width) - 1)
