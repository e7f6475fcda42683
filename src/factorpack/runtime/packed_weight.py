"""A weight that is held in memory as packed codes and rebuilt each time it is read.

On a GPU, codes are held entropy-coded where that is smaller: in lanes, see lanes.py. Elsewhere they have a
fixed width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.decoding import check_indices, rebuild
from factorpack.kinds import KINDS
from factorpack.kinds.base import Specs
from factorpack.kinds.scalar_codes import may_clamp
from factorpack.kinds.slices import Range
from factorpack.quantize.uniform import code_dtype, from_codes
from factorpack.record import Encoded
from factorpack.runtime.bit_planes import (
    bit_plane_bytes,
    pack_codes,
    unpack_at,
    unpack_codes,
    unpack_range,
    unpack_reference,
)
from factorpack.runtime.code_rows import (
    find_row_codes,
    pack_rows,
    row_bytes,
    suits,
    unpack_rows,
    unpack_rows_reference,
)
from factorpack.runtime.lane_decode import (
    columns_of,
    decode,
    decoder_of,
    multiply,
    product_of,
    uses_lanes,
)
from factorpack.runtime.lanes import LaneLayout, extent, fits_lanes, pack_lanes
from factorpack.runtime.multiply import on_gpu

FEWEST_IN_LANES = 1024
"""Codes below which a table of frequencies is not worth it."""
ROWS_MARGIN = 1.25
"""What rows of fixed width may take beside lanes: a kernel multiplies by them several times as fast."""


class PackedWeight(nn.Module):
    """The parts of an `Encoded` as buffers of bytes: codes packed to their width, other values as they are.

    Torch sees no floats (except what is folded, which is computed again), so that `model.half()` changes the
    type of the rebuilt weight and not the values it is made of. Bytes also pass through every backend of
    torch.distributed.
    """

    def __init__(self, encoded: Encoded, like: Tensor, form: str = "") -> None:
        """`form` is "packed" for fixed widths, "coded" for what is smallest, and empty for what is fast."""
        super().__init__()
        check_indices(encoded)
        self.kind, self.layout, self.decoded = encoded.kind, encoded.layout, encoded.dtype
        self.shape = encoded.shape
        self.bits = dict(encoded.bits)
        self.part_shapes = {name: tuple(part.shape) for name, part in encoded.parts.items()}
        self.part_dtypes = {name: part.dtype for name, part in encoded.parts.items()}
        self.tiling = KINDS[self.kind].tiling(self.part_shapes)
        self.in_rows = find_row_codes(encoded)
        """Codes that inputs are multiplied by directly, and their shape then: (outputs, codes per output)."""
        self.lanes: dict[str, LaneLayout] = {}
        """Codes that are entropy-coded, and where everything is in their bytes."""
        self.rows_margin = 1.0 if form == "coded" else ROWS_MARGIN
        is_laned = form != "packed" and uses_lanes(like)
        for name, part in encoded.parts.items():
            self.register_buffer(name, self._stored(name, part.to(like.device), is_laned))
        self.scaled_lanes = self._scaled_lanes(encoded)
        self.has_product = (
            self.scaled_lanes in ("one", "column") and self.lanes["codes"].columns == self.shape[0]
        )
        """Whether a vector can be multiplied by lanes, without decoding the weight to memory."""
        self._product: Callable[[Tensor], Tensor] | None = None
        self._columns: Callable[[Tensor], Tensor] | None = None
        self._decoder: Callable[[], Tensor] | None = None
        self._row_scale: Tensor | None = None
        self.codes: Tensor
        self.scale: Tensor
        self.like: Tensor
        self.register_buffer("like", torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)
        self.folded: Tensor | None
        self.register_buffer("folded", None, persistent=False)
        self.folded_mean: Tensor | None
        self.register_buffer("folded_mean", None, persistent=False)

    def _stored(self, name: str, part: Tensor, is_laned: bool) -> Tensor:
        if name not in self.bits:
            return part.contiguous().view(torch.uint8)
        is_transposed, _, width = self._memory_shape(name)
        codes = part.T if is_transposed else part
        if is_laned and part.numel() >= FEWEST_IN_LANES and fits_lanes(*extent(part)):
            by_input = self._is_by_input(name)
            outputs = self.layout.outputs if part.numel() % self.layout.outputs == 0 else 1
            columns = outputs if by_input else part.numel() // outputs
            numbers = (codes.T if by_input else codes).contiguous()
            stored, layout = pack_lanes(numbers, columns, width if is_transposed else 1, free=not by_input)
            margin = self.rows_margin if name in self.in_rows else 1.0
            if margin * stored.numel() < self._fixed_bytes(name):
                self.lanes[name] = layout
                self.in_rows.pop(name, None)
                return stored
        if name in self.in_rows:
            return pack_rows(codes.reshape(self.in_rows[name]), self.bits[name])
        return pack_codes(codes, self.bits[name])

    def _fixed_bytes(self, name: str) -> int:
        """What codes take at a fixed width."""
        if name not in self.in_rows:
            return bit_plane_bytes(math.prod(self.part_shapes[name]), self.bits[name])
        rows, columns = self.in_rows[name]
        return rows * row_bytes(columns, self.bits[name])

    def _is_by_input(self, name: str) -> bool:
        """Whether lanes have a row of codes per input and not per output: a product then needs no sum of lanes."""
        return self.kind == "scalar" and name == "codes" and len(self.shape) == 2

    def fold(self) -> None:
        """Stores C times all scales, (d, k), where Z is in rows and then needs no scale; and mu of all tiles
        of a row, (K, 1). To compute them at every call would cost more than the products. Both are in the
        weight's type, or in FP32 for FP16, which cannot hold the scales.
        """
        if "latent" not in self.in_rows or self.part_shapes["latent_scale"][1] != 1:
            return
        dtype = torch.float32 if self.like.dtype == torch.float16 else self.like.dtype
        codebook = from_codes(self.part("codebook"), self.part("codebook_scale"))
        self.folded = (codebook * self.part("latent_scale").T).to(dtype)
        if "mean" in self.part_shapes:
            tiles = self.shape[1] // len(codebook)
            self.folded_mean = self.part("mean").to(dtype).repeat(tiles, 1)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._product = self._columns = self._decoder = self._row_scale = (
            None  # with assign=True there are other tensors now
        )
        if self.folded is not None:
            self.fold()

    def _apply(self, *args: Any, **kwargs: Any) -> PackedWeight:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._product = self._columns = self._decoder = self._row_scale = (
            None  # their tensors may be elsewhere now
        )
        if self.folded is not None:  # again, since a narrow type has lost what a wide one holds
            self.fold()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which have tensors of their own."""
        return {**self.__dict__, "_product": None, "_columns": None, "_decoder": None, "_row_scale": None}

    def forward(self) -> Tensor:
        """The weight as `load_into` would give it to the model."""
        if self.scaled_lanes:
            weight = self._scaled()
            return weight.view(-1, self.shape[0]).T if self._is_by_input("codes") else weight.view(self.shape)
        # The file defines products in FP32, with mixed precision or without.
        with torch.autocast(self.like.device.type, enabled=False):
            # A compiler would unroll every slice, and on a GPU many small kernels take longer.
            if torch.compiler.is_compiling() or self.like.device.type != "cpu":
                return rebuild(self.encoded()).to(self.like.dtype)
            return self._by_slices()

    def _scaled_lanes(self, encoded: Encoded) -> str:
        """How scales go with lanes, where these decode to the weight itself: see `decode`. Otherwise empty."""
        if self.kind != "scalar" or not self.lanes or self.layout.transposed_groups or may_clamp(encoded):
            return ""
        scales, columns = self.part_shapes["scale"][0], self.lanes["codes"].columns
        if scales == 1:
            return "one"
        if self._is_by_input("codes"):
            return "column" if columns == scales else ""
        return "row" if columns * scales == math.prod(self.shape) else ""

    def _scaled(self) -> Tensor:
        """The weight from lanes that decode to it."""
        if not torch.compiler.is_compiling():
            if self._decoder is not None:
                return self._decoder()
            if on_gpu(self.codes):
                self._decoder = decoder_of(*self._lane_arguments())
                return self._decoder()
        return decode(*self._lane_arguments())

    def _lane_arguments(self) -> tuple[Tensor, LaneLayout, Tensor, str, torch.dtype, torch.dtype]:
        scale = self.scale.view(self.part_dtypes["scale"])
        return self.codes, self.lanes["codes"], scale, self.scaled_lanes, self.like.dtype, self.decoded

    def multiplied(self, inputs: Tensor) -> Tensor:
        """A vector of inputs times the weight, (..., K) -> (..., N), with scales applied to the sums."""
        if self._product is not None and not torch.compiler.is_compiling():
            return self._product(inputs)
        codes, layout, scale = self._lane_arguments()[:3]
        if not torch.compiler.is_compiling() and on_gpu(codes):
            self._product = product_of(codes, layout, scale.view(-1))
            return self._product(inputs)
        return multiply(inputs, codes, layout, scale.view(-1))

    @property
    def row_scale(self) -> Tensor:
        """The scales of codes in rows: (outputs,) or (1,)."""
        if torch.compiler.is_compiling():
            return self.part("scale").view(-1)
        if self._row_scale is None:
            self._row_scale = self.part("scale").view(-1)
        return self._row_scale

    def _by_slices(self) -> Tensor:
        slices = KINDS[self.kind].cut(self.layout, self.part_shapes)
        if len(slices) < 2:
            return rebuild(self.encoded()).to(self.like.dtype)
        weight = torch.empty(self.shape, dtype=self.like.dtype)
        whole = {name: self.part(name) for name in self.part_shapes if name not in slices[0].ranges}
        for each in slices:
            parts = {
                name: whole[name] if name in whole else self.part(name, each.ranges[name])
                for name in self.part_shapes
            }
            each.write(rebuild(self._encoded(each.shape, parts)), weight)
        return weight

    @property
    def has_rows(self) -> bool:
        """Whether each entry of the weight's first axis consists of complete tiles, with codes of its own."""
        if self.tiling is None or self.layout.transposed_groups or not self.shape[0]:
            return False
        return math.prod(self.shape[1:]) % self.tiling.size == 0

    def rows(self, index: Tensor) -> Tensor:
        """Entries of the weight's first axis, (n,) -> (n, ...), without rebuilding the others."""
        assert self.tiling is not None
        if self._gathers(len(index)):
            return self._gathered(index)
        each = math.prod(self.shape[1:]) // self.tiling.size
        count, device = self.shape[0] * each, index.device
        # Raises an error for an index outside the rows.
        known = torch.arange(0, count, each, device=device).index_select(0, index)
        tiles = (known[:, None] + torch.arange(each, device=device)).reshape(-1)
        axes = self.tiling.axes
        parts = {
            name: self._at(name, axes[name], index, tiles)
            if name in axes and shape[axes[name]] == count
            else self.part(name)
            for name, shape in self.part_shapes.items()
        }
        with torch.autocast(self.like.device.type, enabled=False):
            found = rebuild(self._encoded((len(index), *self.shape[1:]), parts))
        return found.to(self.like.dtype)

    def _gathers(self, count: int) -> bool:
        """Whether rows of the weight are columns of lanes, and so few that all groups of lanes take longer."""
        if not self.has_product or not on_gpu(self.codes) or torch.compiler.is_compiling():
            return False
        return 2 * count < self.lanes["codes"].groups

    def _gathered(self, index: Tensor) -> Tensor:
        if self._columns is None:
            self._columns = columns_of(*self._lane_arguments())
        return self._columns(index.long())

    def _at(self, name: str, axis: int, rows: Tensor, tiles: Tensor) -> Tensor:
        """A part's entries for some rows, which consist of `tiles`, along the first axis that codes have in memory."""
        if name not in self.bits:
            return self.part(name).index_select(axis, tiles)
        if name in self.lanes:
            return self.part(name).index_select(axis, tiles)
        is_transposed, count, width = self._memory_shape(name)
        assert axis == is_transposed
        stored, bits = getattr(self, name), self.bits[name]
        if name in self.in_rows:
            codes = unpack_rows_reference(stored.index_select(0, rows), bits, self.in_rows[name][1])
            codes = codes.view(-1, width)
        else:
            numbers = tiles[:, None] * width + torch.arange(width, device=tiles.device)
            codes = unpack_at(stored, bits, count * width, numbers)
        return codes.T if is_transposed else codes

    def encoded(self) -> Encoded:
        """The `Encoded` it was made from, without the notes."""
        return self._encoded(self.shape, {name: self.part(name) for name in self.part_shapes})

    def _encoded(self, shape: tuple[int, ...], parts: dict[str, Tensor]) -> Encoded:
        return Encoded(self.kind, shape, self.decoded, parts, self.bits, self.layout.transposed_groups)

    def part(self, name: str, taken: Range | None = None) -> Tensor:
        """A part, or a range of it; a range of codes must be along their first axis in memory."""
        stored: Tensor = getattr(self, name)
        if name not in self.bits:
            whole = stored.view(self.part_dtypes[name])
            return whole if taken is None else taken.of(whole)
        is_transposed, count, width = self._memory_shape(name)
        if taken is not None and name in self.lanes:
            return taken.of(self.part(name))
        if taken is None:
            codes = self._codes(name, count * width)
        else:
            assert taken.axis == is_transposed
            codes = self._codes_in(name, taken.start * width, (taken.start + taken.length) * width)
        return codes.view(-1, width).T if is_transposed else codes.view(-1, width)

    def _codes(self, name: str, count: int) -> Tensor:
        """All codes of a part, in memory order."""
        stored, bits = getattr(self, name), self.bits[name]
        if name in self.lanes:
            dtype = code_dtype(bits)
            codes = decode(stored, self.lanes[name], None, "", dtype, dtype)
            return codes.view(-1, self.shape[0]).T.reshape(-1) if self._is_by_input(name) else codes
        # The first call of a custom operator makes torch import its compiler, which takes seconds.
        compiling = torch.compiler.is_compiling()
        if name in self.in_rows:
            unpack = unpack_rows if compiling else unpack_rows_reference
            codes = unpack(stored, bits, self.in_rows[name][1])
        else:
            codes = unpack_codes(stored, bits, count) if compiling else unpack_reference(stored, bits, count)
        return codes

    def _codes_in(self, name: str, start: int, stop: int) -> Tensor:
        """Codes `start` to `stop` - 1, with few others unpacked: (stop - start,)."""
        stored, bits = getattr(self, name), self.bits[name]
        if name not in self.in_rows:
            return unpack_range(stored, bits, math.prod(self.part_shapes[name]), start, stop)
        width = self.in_rows[name][1]
        first, last = start // width, -(-stop // width)
        codes = unpack_rows_reference(stored[first:last], bits, width).view(-1)
        return codes[start - first * width : stop - first * width]

    def _memory_shape(self, name: str) -> tuple[bool, int, int]:
        """Whether codes are held transposed, and their rows and columns as they are held.

        The codes of a tile lie side by side: the order in which a layer reads them.
        """
        rows, columns = self.part_shapes[name]
        is_transposed = self.tiling is not None and self.tiling.axes.get(name) == 1
        return (True, columns, rows) if is_transposed else (False, rows, columns)

    def extra_repr(self) -> str:
        widths = ", ".join(
            f"{name} of {bits} bits, entropy-coded" if name in self.lanes else f"{name} of {bits} bits"
            for name, bits in self.bits.items()
        )
        return f"{tuple(self.shape)} as {self.kind}: {widths}"


def packed_bytes(shape: tuple[int, ...], parts: Specs) -> int:
    """What a weight of these parts takes at fixed widths, at most: rows of codes may be padded."""
    total = 0
    for spec in parts.values():
        count = math.prod(spec.shape)
        if not spec.bits:
            total += count * spec.dtype.itemsize
            continue
        size, columns = bit_plane_bytes(count, spec.bits), count // max(shape[0], 1)
        if len(shape) == 2 and suits(columns, spec.bits):
            size = max(size, shape[0] * row_bytes(columns, spec.bits))
        total += size
    return total
