"""Lanes back to codes or weights: the reference in plain torch, the operator, and the choice of what computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import torch
from torch import Tensor

from factorpack.quantize.uniform import from_codes
from factorpack.runtime import nvrtc
from factorpack.runtime.lane_encode import FIRST_WORDS, GROUP
from factorpack.runtime.lane_models import COUNT_BITS, FIELD_BITS, LIMIT, PAIR_BITS, entries_of
from factorpack.runtime.lanes import LaneLayout
from factorpack.runtime.multiply import on_device, on_gpu, warn_once


class _Reader:
    """All lanes, (segments, lanes): what each has of its words, and which are next for a group."""

    def __init__(self, packed: Tensor, layout: LaneLayout) -> None:
        shape = (layout.segments, layout.lanes)
        self.words = packed[: layout.states_at].view(torch.int32)
        states = packed[layout.states_at :][: 2 * layout.segments * layout.lanes]
        self.states = states.view(torch.int16).long().view(shape)
        groups = _integers(packed, layout.groups_at, 2 * layout.segments * layout.groups)
        first = groups.view(layout.segments, layout.groups, 2)[:, :, 0]
        lane = torch.arange(layout.lanes, device=packed.device)
        self.group = (lane // GROUP).expand(shape)
        width = (layout.lanes - lane // GROUP * GROUP).clamp(max=GROUP)
        place = first.gather(1, self.group) + lane % GROUP
        self.held = [self._words_at(place + number * width) for number in range(FIRST_WORDS)]
        self.next = first + FIRST_WORDS * (layout.lanes - GROUP * torch.arange(layout.groups)).clamp(
            max=GROUP
        ).to(packed.device)
        # The bit to be read next, in the first of the words; the highest one is a mark.
        self.place = 32 - self.held[0].double().log2().floor().long()

    def _words_at(self, places: Tensor) -> Tensor:
        """A lane that has used all of its words takes anything."""
        return self.words[places.clamp(max=len(self.words) - 1)].long() & 0xFFFFFFFF

    def take(self, rows: int) -> None:
        """Lanes of the first segments that have used a word drop it, and take the next of their group."""
        wanted, group = self.place[:rows] >= 32, self.group[:rows]
        before = wanted.long().cumsum(1)
        ends = torch.arange(GROUP - 1, before.shape[1] + GROUP - 1, GROUP, device=before.device)
        until = before[:, ends.clamp(max=before.shape[1] - 1)]
        started = until - torch.diff(until, dim=1, prepend=torch.zeros_like(until[:, :1]))
        rank = before - 1 - started.gather(1, group)
        taken = self._words_at(self.next[:rows].gather(1, group) + rank.clamp(min=0))
        for own, later in zip(self.held, [*(each[:rows] for each in self.held[1:]), taken], strict=True):
            own[:rows] = torch.where(wanted, later, own[:rows])
        self.next[:rows] += until - started
        self.place[:rows] -= 32 * wanted.long()

    def read(self, rows: int, count: Tensor) -> Tensor:
        """The next bits of lanes of the first segments, as numbers."""
        window = self.held[0][:rows] << 32 | self.held[1][:rows]
        found = window >> (64 - count - self.place[:rows]).clamp(max=63)
        self.place[:rows] += count
        return found & (1 << count) - 1


def decode_reference(packed: Tensor, layout: LaneLayout, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_lanes`, in plain torch: (count,)."""
    entries, reader, rows = _entries(packed, layout), _Reader(packed, layout), layout.rows
    codes = torch.empty(rows, layout.columns, dtype=dtype, device=packed.device)
    model = packed.new_zeros(rows, 1, dtype=torch.int64)
    if layout.models > 1:
        classes = _halves(packed[layout.classes_at :], rows + layout.columns)
        model = classes[:rows, None] + classes[rows : rows + layout.columns]
    raw = torch.tensor(layout.raw_bits, device=packed.device)
    for step in range(min(layout.segment, rows)):
        own = codes[step :: layout.segment]
        state = reader.states[: len(own)]
        if step % layout.steps == 0:
            reader.take(len(own))
        entry = entries[(model[step :: layout.segment] << layout.table_bits) + state]
        count = entry & (1 << COUNT_BITS) - 1
        base = entry >> COUNT_BITS + FIELD_BITS & (1 << 32 - COUNT_BITS - FIELD_BITS) - 1
        state.copy_((base << count | reader.read(len(own), count)) - (1 << layout.table_bits))
        field = entry >> COUNT_BITS & (1 << FIELD_BITS) - 1
        if layout.is_pair:
            own.copy_(_unpaired(field))
        else:
            own.copy_(field + reader.read(len(own), raw) - LIMIT)
    if layout.has_patches:
        _patch(codes, packed, layout)
    return codes.view(-1)[: layout.count]


def _entries(packed: Tensor, layout: LaneLayout) -> Tensor:
    """The entry of every slot of every model."""
    count = layout.models << layout.table_bits
    if not layout.is_indirect:
        return _integers(packed, layout.table_at, count)
    numbers = packed[layout.table_at : layout.table_at + count].view(layout.models, -1).cpu().numpy()
    found = entries_of(numbers, layout.table_bits, layout.raw_bits, layout.low, layout.is_pair)
    return torch.from_numpy(found.view("int32").ravel()).long().to(packed.device)


def _halves(packed: Tensor, count: int) -> Tensor:
    """Numbers of four bits, two in each byte."""
    found = packed[: -(-count // 2)].long()
    return torch.stack([found & 15, found >> 4], 1).view(-1)[:count]


def _unpaired(fields: Tensor) -> Tensor:
    """Pairs as codes: (..., n) -> (..., 2n)."""
    half = 1 << PAIR_BITS - 1
    return (torch.stack([fields >> PAIR_BITS, fields & 2 * half - 1], -1) - half).flatten(-2)


def _patch(codes: Tensor, packed: Tensor, layout: LaneLayout) -> None:
    """Writes the codes that have no symbol of their own."""
    groups = layout.segments * layout.groups
    before = _integers(packed, layout.groups_at, 2 * groups + 2)[1::2]
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
    if on_gpu(packed):
        from factorpack.runtime.lane_cuda import LaneDecoder  # only where there is a GPU

        with on_device(packed):
            return LaneDecoder(packed, layout, scale, scaled, dtype, decoded)()
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
    if on_gpu(packed):
        return product_of(packed, layout, scale)(inputs)
    codes = decode_reference(packed, layout, torch.int16).view(-1, layout.columns)
    return (inputs.float() @ codes.float() * scale.float()).to(inputs.dtype)


def product_of(packed: Tensor, layout: LaneLayout, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """`multiply` by one weight on a GPU, with everything but the inputs looked up once."""
    from factorpack.runtime.lane_cuda import LaneProduct  # only where there is a GPU

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
    from factorpack.runtime.lane_cuda import LaneDecoder  # only where there is a GPU

    decoder = LaneDecoder(packed, layout, scale, scaled, dtype, decoded)

    def decoded_now() -> Tensor:
        with on_device(packed):
            return decoder()

    return decoded_now


def columns_of(
    packed: Tensor,
    layout: LaneLayout,
    scale: Tensor,
    scaled: str,
    dtype: torch.dtype,
    decoded: torch.dtype,
) -> Callable[[Tensor], Tensor]:
    """Some columns of one weight on a GPU, by their numbers: (n,) -> (n, rows)."""
    from factorpack.runtime.lane_cuda import ColumnDecoder  # only where there is a GPU

    decoder = ColumnDecoder(packed, layout, scale, scaled, dtype, decoded)

    def gathered(wanted: Tensor) -> Tensor:
        with on_device(packed):
            return decoder(wanted.contiguous())

    return gathered


def uses_lanes(like: Tensor) -> bool:
    """Whether codes beside this tensor are held in lanes; where a GPU cannot decode them, one line says so."""
    if not on_gpu(like):
        return False
    obstacle = nvrtc.why_not(like.device.index)
    if obstacle:
        warn_once(f"packed codes are held at fixed width, not entropy-coded: {obstacle}")
    return not obstacle
