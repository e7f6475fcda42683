"""Lanes back to codes or weights: the reference in plain torch, the operator, and the choice of what computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch
from torch import Tensor

from factorpack.quantize.uniform import from_codes
from factorpack.runtime.lane_models import PAIR_BITS, STATE_BITS, WORD_BITS
from factorpack.runtime.lanes import GROUP, TAIL_AT, TAILS, LaneLayout
from factorpack.runtime.multiply import has_triton, on_device, on_gpu, warn_once


class _Reader:
    """All lanes, (segments, columns): where each takes its next word from."""

    def __init__(self, packed: Tensor, layout: LaneLayout) -> None:
        shape = (layout.segments, layout.lanes)
        self.words = packed[: layout.headers_at].view(torch.int16)
        count = layout.segments * layout.lanes
        sections = packed[layout.headers_at : layout.groups_at]
        headers = sections[: 4 * count].view(torch.int32).long().view(shape)
        groups = _integers(packed, layout.groups_at, 4 * layout.segments * layout.groups)
        self.state = headers & ((1 << STATE_BITS + WORD_BITS) - 1)
        tails = headers >> TAIL_AT & TAILS[0]
        if layout.tail_bits:
            longer = sections[4 * count : 5 * count]
            tails = (
                tails | (_halves(longer, count) if layout.tail_bits == 4 else longer.long()).view(shape) << 4
            )
        lane = torch.arange(layout.lanes, device=packed.device)
        group, within = lane // GROUP, lane % GROUP
        first, levels, _, _ = groups.view(layout.segments, layout.groups, 4)[:, group].unbind(2)
        self.stride = (layout.lanes - GROUP * group).clamp(max=GROUP)
        before = tails.cumsum(1) - tails
        self.tail = first + levels * self.stride + before - before[:, group * GROUP]
        self.start = first + within
        self.levels = levels
        self.taken = torch.zeros_like(levels)

    def take(self, rows: int, wanted: Tensor) -> Tensor:
        """The next word of lanes of the first segments; those that do not want it keep it."""
        taken, levels = self.taken[:rows], self.levels[:rows]
        inside = self.start[:rows] + taken * self.stride
        place = torch.where(taken < levels, inside, self.tail[:rows] + taken - levels)
        taken += wanted
        return self.words[place].long()


def decode_reference(packed: Tensor, layout: LaneLayout, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_lanes`, in plain torch: (count,)."""
    table = _table(packed, layout)
    bits, raw, rows = layout.table_bits, layout.raw_bits, layout.rows
    mask, reader = (1 << bits) - 1, _Reader(packed, layout)
    codes = torch.empty(rows, layout.columns, dtype=dtype, device=packed.device)
    model = packed.new_zeros(rows, 1, dtype=torch.int64)
    if layout.models > 1:
        classes = _halves(packed[layout.classes_at :], rows + layout.columns)
        model = classes[:rows, None] + classes[rows : rows + layout.columns]
    for step in range(min(layout.segment, rows)):
        own = codes[step :: layout.segment]
        state = reader.state[: len(own)]
        low = state & ((1 << raw) - 1)
        slot = state >> raw & mask
        entry = table[(model[step :: layout.segment] << bits) + slot]
        state.copy_(((entry & mask) + 1) * (state >> raw + bits) + slot - (entry >> bits & mask))
        wanted = state < 1 << STATE_BITS
        word = reader.take(len(own), wanted) & 0xFFFF
        state.copy_(torch.where(wanted, state << WORD_BITS | word, state))
        symbol = entry >> 2 * bits
        own.copy_(_unpaired(symbol) if layout.is_pair else symbol << raw | low)
    if layout.has_patches:
        _patch(codes, packed, layout)
    return codes.view(-1)[: layout.count]


def _table(packed: Tensor, layout: LaneLayout) -> Tensor:
    """The entry of every slot of every model."""
    count = layout.models << layout.table_bits
    if not layout.is_indirect:
        return _integers(packed, layout.table_at, count)
    slots = packed[layout.table_at : layout.table_at + count].long()
    model = torch.arange(layout.models, device=packed.device).repeat_interleave(1 << layout.table_bits)
    number = model * layout.stride + slots
    return _integers(packed, layout.table_at + count, int(number.max()) + 1)[number]


def _halves(packed: Tensor, count: int) -> Tensor:
    """Numbers of four bits, two in each byte."""
    found = packed[: -(-count // 2)].long()
    return torch.stack([found & 15, found >> 4], 1).view(-1)[:count]


def _unpaired(symbols: Tensor) -> Tensor:
    """Pairs as codes: (..., n) -> (..., 2n)."""
    half = 1 << PAIR_BITS - 1
    second = (symbols & 2 * half - 1 ^ half) - half
    return torch.stack([symbols >> PAIR_BITS, second], -1).flatten(-2)


def _patch(codes: Tensor, packed: Tensor, layout: LaneLayout) -> None:
    """Writes the codes that have no symbol of their own."""
    groups = layout.segments * layout.groups
    before = _integers(packed, layout.groups_at, 4 * groups + 4)[3::4]
    patches = _integers(packed, layout.patches_at, int(before[-1]))
    group = torch.repeat_interleave(torch.arange(groups, device=packed.device), before.diff())
    width = GROUP * layout.columns // layout.lanes
    row = group // layout.groups * layout.segment + (patches >> 20 & 0xFFF)
    column = group % layout.groups * width + (patches >> 12 & 0xFF)
    codes[row, column] = ((patches & 0xFFF ^ 0x800) - 0x800).to(codes.dtype)


def _integers(packed: Tensor, start: int, count: int) -> Tensor:
    return packed[start : start + 4 * count].view(torch.int32).long()


def decode(
    packed: Tensor,
    layout: LaneLayout,
    scale: Tensor | None,
    scaled: str,
    dtype: torch.dtype,
    decoded: torch.dtype,
) -> Tensor:
    """Codes, or their products with the scale, as (rows, columns) without padding: (count,).

    `scaled` is "" for codes, "one" for one scale, "row" or "column" for one per row or column. Products are
    rounded to `decoded` and then converted to `dtype`, as where the weight is dense.
    """
    if torch.compiler.is_compiling():
        numbers = [int(each) for each in astuple(layout)]
        found: Tensor = decode_lanes(packed, numbers, scale, scaled, dtype, decoded)
        return found
    return _fastest(packed, layout, scale, scaled, dtype, decoded)


# Operators for compilers. They have no gradient and change no argument, so they need nothing of what
# `torch.library.custom_op` adds, which takes twice as long to call.
torch.library.define(
    "factorpack::decode_lanes",
    "(Tensor packed, int[] layout, Tensor? scale, str scaled, ScalarType dtype, ScalarType decoded) -> Tensor",
)
torch.library.define(
    "factorpack::multiply_lanes", "(Tensor inputs, Tensor packed, int[] layout, Tensor scale) -> Tensor"
)
decode_lanes = torch.ops.factorpack.decode_lanes.default
multiply_lanes = torch.ops.factorpack.multiply_lanes.default


@torch.library.impl("factorpack::decode_lanes", "CompositeExplicitAutograd")
def _decode_operator(
    packed: Tensor,
    layout: list[int],
    scale: Tensor | None,
    scaled: str,
    dtype: torch.dtype,
    decoded: torch.dtype,
) -> Tensor:
    return _fastest(packed, _layout(layout), scale, scaled, dtype, decoded)


@torch.library.register_fake("factorpack::decode_lanes")  # type: ignore[untyped-decorator]
def _decode_shape(
    packed: Tensor,
    layout: list[int],
    scale: Tensor | None,  # noqa: ARG001
    scaled: str,  # noqa: ARG001
    dtype: torch.dtype,
    decoded: torch.dtype,  # noqa: ARG001
) -> Tensor:
    return packed.new_empty(layout[0], dtype=dtype)


def _layout(numbers: list[int]) -> LaneLayout:
    return LaneLayout(*numbers)  # type: ignore[arg-type]  # flags are 0 and 1 here


def _fastest(
    packed: Tensor,
    layout: LaneLayout,
    scale: Tensor | None,
    scaled: str,
    dtype: torch.dtype,
    decoded: torch.dtype,
) -> Tensor:
    if on_gpu(packed) and has_triton():
        from factorpack.runtime import lane_triton  # only where there is a GPU

        out = torch.empty(layout.count, dtype=dtype, device=packed.device)
        with on_device(packed):
            lane_triton.decode_lanes(packed, layout, scale, scaled, out, decoded)
        return out
    if scale is None:
        return decode_reference(packed, layout, dtype)
    codes = decode_reference(packed, layout, torch.int16).view(-1, layout.columns)
    by_row = scale.view(-1, 1) if scaled == "row" else scale.view(1, -1)
    return from_codes(codes, by_row).to(decoded).to(dtype).view(-1)


def multiply(inputs: Tensor, packed: Tensor, layout: LaneLayout, scale: Tensor) -> Tensor:
    """A vector times the matrix, then times one scale or one per column: (..., rows) -> (..., columns)."""
    if torch.compiler.is_compiling():
        numbers = [int(each) for each in astuple(layout)]
        found: Tensor = multiply_lanes(inputs, packed, numbers, scale)
        return found
    return _product(inputs, packed, layout, scale)


@torch.library.impl("factorpack::multiply_lanes", "CompositeExplicitAutograd")
def _multiply_operator(inputs: Tensor, packed: Tensor, layout: list[int], scale: Tensor) -> Tensor:
    return _product(inputs, packed, _layout(layout), scale)


@torch.library.register_fake("factorpack::multiply_lanes")  # type: ignore[untyped-decorator]
def _multiply_shape(inputs: Tensor, packed: Tensor, layout: list[int], scale: Tensor) -> Tensor:  # noqa: ARG001
    return inputs.new_empty((*inputs.shape[:-1], layout[1]))


def _product(inputs: Tensor, packed: Tensor, layout: LaneLayout, scale: Tensor) -> Tensor:
    if on_gpu(packed) and has_triton():
        return product_of(packed, layout, scale)(inputs)
    codes = decode_reference(packed, layout, torch.int16).view(-1, layout.columns)
    return (inputs.float() @ codes.float() * scale.float()).to(inputs.dtype)


def product_of(packed: Tensor, layout: LaneLayout, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """`multiply` by one weight on a GPU, with everything but the inputs looked up once."""
    from factorpack.runtime.lane_triton import LaneProduct  # only where there is a GPU

    product = LaneProduct(packed, layout, scale)

    def multiplied(inputs: Tensor) -> Tensor:
        with on_device(packed):
            return product(inputs.contiguous())

    return multiplied


def decoder_of(
    packed: Tensor,
    layout: LaneLayout,
    scale: Tensor,
    scaled: str,
    dtype: torch.dtype,
    decoded: torch.dtype,
) -> Callable[[], Tensor]:
    """`decode` of one weight on a GPU, with everything looked up once."""
    from factorpack.runtime.lane_triton import LaneDecoder  # only where there is a GPU

    decoder = LaneDecoder(packed, layout, scale, scaled, dtype, decoded)

    def decoded_now() -> Tensor:
        with on_device(packed):
            return decoder()

    return decoded_now


def uses_lanes(like: Tensor) -> bool:
    """Whether codes beside this tensor are held in lanes; where a GPU cannot decode them, one line says so."""
    if not on_gpu(like):
        return False
    if not has_triton():
        warn_once("packed codes are held at fixed width, not entropy-coded: that needs triton")
        return False
    major, minor = torch.cuda.get_device_capability(like.device)
    if torch.version.cuda is not None and major < 8:
        warn_once(
            "packed codes are held at fixed width, not entropy-coded: "
            f"that needs a GPU of compute capability 8.0, this one has {major}.{minor}"
        )
        return False
    return True
