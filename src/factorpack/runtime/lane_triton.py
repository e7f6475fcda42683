"""Kernels that decode lanes: a thread per lane, a row of codes per step.

A step waits for two loads: an entry of the table, and sometimes a word. The table stays in the multiprocessor's
first cache. Words are touched some steps before they are needed, which brings them there too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from factorpack.record import dtype_name
from factorpack.runtime import launching
from factorpack.runtime.lanes import GROUP, LaneLayout
from factorpack.runtime.launching import Prepared, Run
from factorpack.runtime.multiply_triton import SUMMED, add_splits


@dataclass(frozen=True, slots=True)
class Variant:
    """How the kernel computes what it computes: the numbers are the same, the time is not."""

    steps: int = 32
    """Steps between touches."""
    unroll: int = 4
    """Steps of which the code is repeated."""
    adds: bool = False
    """Whether a code becomes a float by two additions and not by a conversion, of which a GPU does a quarter as many
    at a time."""


CHOSEN = Variant()
"""The fastest that was measured. benchmarks/studies/resident times others."""


@triton.jit  # type: ignore[untyped-decorator]
def _next_word(wanted, word, place, left, words, stride, tail, TAILS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lanes that used their word load the next one."""
    if TAILS:
        left -= wanted.to(tl.int32)
        after = tl.where(left > 0, place + stride, tl.where(left == 0, tail, place + 1))
        place = tl.where(wanted, after, place)
    else:
        place = tl.where(wanted, place + stride, place)
    word = tl.where(wanted, tl.load(words + place, wanted, 0).to(tl.int32), word)
    return word, place, left


@triton.jit  # type: ignore[untyped-decorator]
def _next_codes(  # type: ignore[no-untyped-def]
    state,
    word,
    place,
    left,
    words,
    table,
    stride,
    tail,
    entries,
    own,
    N: tl.constexpr,
    RAW: tl.constexpr,
    PAIR: tl.constexpr,
    INDIRECT: tl.constexpr,
    STRIDE: tl.constexpr,
    TAILS: tl.constexpr,
):
    """The next code of every lane, or the next two, and how it goes on; `own` is the number of its model."""
    MASK: tl.constexpr = (1 << N) - 1
    WIDTH: tl.constexpr = 5
    slot = (state >> RAW) & MASK
    if INDIRECT:
        symbol = tl.load(table + ((own << N) + slot)).to(tl.int32)
        entry = tl.load(entries + (own * STRIDE + symbol))
    else:
        entry = tl.load(entries + ((own << N) + slot))
    low = state & ((1 << RAW) - 1)
    state = ((entry & MASK) + 1) * (state >> (RAW + N)) + (slot - ((entry >> N) & MASK))
    wanted = state < 4096
    state = tl.where(wanted, (state << 16) | word, state)
    word, place, left = _next_word(wanted, word, place, left, words, stride, tail, TAILS)
    symbol = entry >> (2 * N)
    if PAIR:
        first = symbol >> WIDTH
        second = (symbol << (32 - WIDTH)) >> (32 - WIDTH)
    else:
        first = (symbol << RAW) | low
        second = first
    return first, second, state, word, place, left


@triton.jit  # type: ignore[untyped-decorator]
def _float(code, ADDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A code as a float. 2^23 + 2^11 + code is exact, and its lowest bits are those of an integer."""
    number = code.to(tl.float32)
    if ADDS:
        number = (code + 0x4B000800).to(tl.float32, bitcast=True) - 8390656.0
    return number


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    start,
    stop,
    state,
    word,
    place,
    left,
    even,
    odd,
    words,
    table,
    stride,
    tail,
    entries,
    classes,
    of_lane,
    inputs,
    scale,
    factor,
    out,
    count,
    columns,
    column,
    kept,
    N: tl.constexpr,
    RAW: tl.constexpr,
    CLASSED: tl.constexpr,
    PAIR: tl.constexpr,
    INDIRECT: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    DECODED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    ADDS: tl.constexpr,
    TAILS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Some rows of all lanes: stored, or multiplied by the inputs and added up."""
    number = tl.zeros([1], tl.int64) + start
    number = number * columns + column
    for at in tl.range(start, stop, loop_unroll_factor=UNROLL):
        own = of_lane
        if CLASSED:
            own = of_lane + ((tl.load(classes + (at >> 1)).to(tl.int32) >> ((at & 1) * 4)) & 15)
        first, second, state, word, place, left = _next_codes(
            state,
            word,
            place,
            left,
            words,
            table,
            stride,
            tail,
            entries,
            own,
            N,
            RAW,
            PAIR,
            INDIRECT,
            STRIDE,
            TAILS,
        )
        if MULTIPLIED:
            value = tl.load(inputs + at).to(tl.float32)
            even += _float(first, ADDS) * value
            if PAIR:
                odd += _float(second, ADDS) * value
        else:
            values = tl.join(first, second) if PAIR else first
            if SCALED == "row":
                factor = tl.load(scale + at).to(tl.float32)
            if SCALED != "":
                values = (_float(values, ADDS) * factor).to(DECODED)
            inside = kept if EVEN else kept & (number < count)
            tl.store(out + number, values.to(out.dtype.element_ty), inside)
            number += columns
    return state, word, place, left, even, odd


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    packed,
    inputs,
    scale,
    out,
    count,
    columns,
    lanes,
    segment,
    groups,
    headers_at,
    groups_at,
    table_at,
    patches_at,
    classes_at,
    rows,
    longer_at,
    entries_at,
    N: tl.constexpr,
    RAW: tl.constexpr,
    CLASSED: tl.constexpr,
    PATCHED: tl.constexpr,
    LONG: tl.constexpr,
    PAIR: tl.constexpr,
    INDIRECT: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    DECODED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    ADDS: tl.constexpr,
):
    """One program: a group of lanes, from the first row of its segment to the last."""
    part = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    within = tl.arange(0, LANES)
    lane = group * LANES + within
    inside = lane < lanes
    words = packed.to(tl.pointer_type(tl.uint16), bitcast=True)
    headers = (packed + headers_at).to(tl.pointer_type(tl.uint32), bitcast=True)
    header = tl.load(headers + part * lanes + lane, inside, 0)
    about = (packed + groups_at).to(tl.pointer_type(tl.int32), bitcast=True) + tl.program_id(0) * 4
    begin, levels, safe = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    state = (header & 0xFFFFFFF).to(tl.int32)
    tails = (header >> 28).to(tl.int32)
    if LONG:
        at = part * lanes + lane
        if LONG == 4:
            more = tl.load(packed + longer_at + (at >> 1), inside, 0).to(tl.int32)
            tails += ((more >> ((at & 1) * 4)) & 15) << 4
        else:
            tails += tl.load(packed + longer_at + at, inside, 0).to(tl.int32) << 4
    stride = min(lanes - group * LANES, LANES)
    tail = begin + levels * stride + tl.cumsum(tails, 0) - tails
    place = tl.where(levels > 0, begin + within, tail)
    place = tl.where(inside, place, begin)
    word = tl.load(words + place).to(tl.int32)
    table = packed + table_at
    entries = (packed + entries_at).to(tl.pointer_type(tl.int32), bitcast=True)
    classes = packed + classes_at
    of_lane = tl.zeros([LANES], tl.int32)
    if CLASSED:
        at = rows + lane
        of_lane = (tl.load(classes + (at >> 1), inside, 0).to(tl.int32) >> ((at & 1) * 4)) & 15
    column, kept = lane, inside
    if PAIR:
        column = (lane * 2)[:, None] + tl.arange(0, 2)[None, :]
        kept = inside[:, None] & (column < columns)
    factor = 1.0
    if SCALED == "one":
        factor = tl.load(scale).to(tl.float32)
    if SCALED == "column":
        factor = tl.load(scale + column, kept, 0.0).to(tl.float32)
    row = part * segment
    stop = min(row + segment, rows)
    middle = min(row + safe, stop)
    left = levels + tl.zeros([LANES], tl.int32)
    even = tl.zeros([LANES], tl.float32)
    odd = tl.zeros([LANES], tl.float32)
    # A sector of 32 bytes per thread: the levels that STEPS steps use, about, two rounds before.
    chunk = levels * stride * STEPS // max(stop - row, 1)
    last = max(begin + levels * stride - 1, begin)
    touched = tl.load(words + tl.minimum(begin + chunk + within * 16, last)).to(tl.int32)
    total = touched
    touched = tl.load(words + tl.minimum(begin + within * 16, last)).to(tl.int32)
    for start in range(row, middle, STEPS):
        total += touched
        ahead = begin + chunk * ((start - row) // STEPS + 2) + within * 16
        touched = tl.load(words + tl.minimum(ahead, last)).to(tl.int32)
        state, word, place, left, even, odd = _rows(
            start,
            min(start + STEPS, middle),
            state,
            word,
            place,
            left,
            even,
            odd,
            words,
            table,
            stride,
            tail,
            entries,
            classes,
            of_lane,
            inputs,
            scale,
            factor,
            out,
            count,
            columns,
            column,
            kept,
            N,
            RAW,
            CLASSED,
            PAIR,
            INDIRECT,
            STRIDE,
            SCALED,
            EVEN,
            DECODED,
            MULTIPLIED,
            ADDS,
            False,
            UNROLL,
        )
    left = tl.where(levels > 0, levels - (place - begin) // stride, 0)
    state, word, place, left, even, odd = _rows(
        middle,
        stop,
        state,
        word,
        place,
        left,
        even,
        odd,
        words,
        table,
        stride,
        tail,
        entries,
        classes,
        of_lane,
        inputs,
        scale,
        factor,
        out,
        count,
        columns,
        column,
        kept,
        N,
        RAW,
        CLASSED,
        PAIR,
        INDIRECT,
        STRIDE,
        SCALED,
        EVEN,
        DECODED,
        MULTIPLIED,
        ADDS,
        True,
        1,
    )
    if MULTIPLIED:
        sums = tl.join(even, odd) if PAIR else even
        tl.store(out + part * columns + column, sums, kept)
    if PATCHED:
        tl.debug_barrier()  # the codes that are patched have been written by other threads
        patches = (packed + patches_at).to(tl.pointer_type(tl.int32), bitcast=True)
        last = tl.load(about + 7)
        for start in range(tl.load(about + 3), last, LANES):
            real = start + within < last
            patch = tl.load(patches + start + within, real, 0)
            at = row + ((patch >> 20) & 0xFFF)
            place = group * LANES * (2 if PAIR else 1) + ((patch >> 12) & 0xFF)
            code = ((patch << 20) >> 20).to(tl.float32)
            if MULTIPLIED:
                value = code * tl.load(inputs + at, real, 0.0).to(tl.float32)
                tl.atomic_add(out + part * columns + place, value, real)
            else:
                weight = code
                if SCALED == "one":
                    weight = (code * factor).to(DECODED)
                if SCALED == "row":
                    weight = (code * tl.load(scale + at, real, 0.0).to(tl.float32)).to(DECODED)
                if SCALED == "column":
                    weight = (code * tl.load(scale + place, real, 0.0).to(tl.float32)).to(DECODED)
                tl.store(out + at.to(tl.int64) * columns + place, weight.to(out.dtype.element_ty), real)
    # No table has so many rows: what is touched must be used, or it would not be loaded.
    tl.store(out + lane, (total & 1).to(out.dtype.element_ty), inside & (rows < 0))


_PREPARED: dict[tuple[object, ...], Prepared] = {}
"""Compiled kernels by all that they depend on but the tensors' places in memory."""


def decode_lanes(
    packed: Tensor, layout: LaneLayout, scale: Tensor | None, scaled: str, out: Tensor, decoded: torch.dtype
) -> None:
    """Decodes into `out`: codes, or their products with the scale, rounded to `decoded` and then converted.

    `scaled` is "" for codes, "one" for one scale, "row" or "column" for one per row or column of the matrix.
    """
    _decode_kernel(layout, False, scaled, decoded).launch(packed, None, scale, out)


def multiply_lanes(inputs: Tensor, packed: Tensor, layout: LaneLayout, scale: Tensor) -> Tensor:
    """A vector times the matrix, then times one scale or one per column: (rows,) -> (columns,)."""
    return LaneProduct(packed, layout, scale)(inputs)


class LaneDecoder:
    """`decode_lanes` of one weight, with everything looked up once."""

    def __init__(
        self,
        packed: Tensor,
        layout: LaneLayout,
        scale: Tensor,
        scaled: str,
        dtype: torch.dtype,
        decoded: torch.dtype,
    ) -> None:
        self._tensors, self._device = (packed, None, scale), packed.device.index
        self._new = partial(torch.empty, layout.count, dtype=dtype, device=packed.device)
        self._decode = _decode_kernel(layout, False, scaled, decoded)
        self._run: Run | None = None

    def __call__(self) -> Tensor:
        out = self._new()  # new tensors begin at multiples of 16 bytes
        if self._run is None:
            self._run = self._decode.launch(*self._tensors, out)
        else:
            self._run(launching.current_stream(self._device), *self._tensors, out)
        return out


class LaneProduct:
    """`multiply_lanes` of one weight, with everything but the inputs looked up once."""

    def __init__(self, packed: Tensor, layout: LaneLayout, scale: Tensor) -> None:
        self._packed, self._scale, self._columns = packed, scale, layout.columns
        self._device = packed.device.index
        segments = layout.segments
        self._new = partial(torch.empty, segments, layout.columns, dtype=torch.float32, device=packed.device)
        self._decode = _decode_kernel(layout, True, "", torch.float32)
        constants = {"SCALED": True, "SUMMED": SUMMED, "MOST": triton.next_power_of_2(segments)}
        numbers = (layout.columns, segments, int(len(scale) > 1))
        self._add = _prepared(add_splits, triton.cdiv(layout.columns, SUMMED), numbers, constants, 4)
        self._runs: dict[tuple[torch.dtype, int], tuple[Run, Run]] = {}

    def __call__(self, inputs: Tensor) -> Tensor:
        """One contiguous vector, of any shape -> the same shape, but for the last dimension."""
        kind = inputs.dtype, inputs.data_ptr() & 15
        runs = self._runs.get(kind)
        shape = (*inputs.shape[:-1], self._columns)
        sums, out = self._new(), torch.empty(shape, dtype=inputs.dtype, device=inputs.device)
        if runs is not None:
            stream = launching.current_stream(self._device)
            runs[0](stream, self._packed, inputs, None, sums)
            runs[1](stream, sums, self._scale, out)
            return out
        decode = self._decode.launch(self._packed, inputs, None, sums)
        add = self._add.launch(sums, self._scale, out)
        if decode is not None and add is not None:
            self._runs[kind] = decode, add
        return out


def _decode_kernel(layout: LaneLayout, is_multiplied: bool, scaled: str, decoded: torch.dtype) -> Prepared:
    constants = _constants(layout, is_multiplied, scaled, decoded)
    return _prepared(_decode, layout.segments * layout.groups, _numbers(layout), constants, GROUP // 32)


def _prepared(
    kernel: Any, grid: int, numbers: tuple[int, ...], constants: dict[str, object], warps: int
) -> Prepared:
    """One for all weights that are launched alike."""
    known = (kernel, grid, numbers, *constants.values())
    if known not in _PREPARED:
        _PREPARED[known] = Prepared(kernel, (grid, 1, 1), numbers, constants, {"num_warps": warps})
    return _PREPARED[known]


def _numbers(layout: LaneLayout) -> tuple[int, ...]:
    return (
        layout.count,
        layout.columns,
        layout.lanes,
        layout.segment,
        layout.groups,
        layout.headers_at,
        layout.groups_at,
        layout.table_at,
        layout.patches_at,
        layout.classes_at,
        layout.rows,
        layout.headers_at + 4 * layout.segments * layout.lanes,
        layout.table_at + (layout.models << layout.table_bits if layout.is_indirect else 0),
    )


def _constants(
    layout: LaneLayout, is_multiplied: bool, scaled: str, decoded: torch.dtype
) -> dict[str, object]:
    """In the order of the kernel's arguments."""
    return {
        "N": layout.table_bits,
        "RAW": layout.raw_bits,
        "CLASSED": layout.models > 1,
        "PATCHED": layout.has_patches,
        "LONG": layout.tail_bits,
        "PAIR": layout.is_pair,
        "INDIRECT": layout.is_indirect,
        "STRIDE": layout.stride,
        "SCALED": scaled,
        "EVEN": layout.count == layout.rows * layout.columns,
        "DECODED": getattr(tl, dtype_name(decoded)),
        "MULTIPLIED": is_multiplied,
        "LANES": GROUP,
        "STEPS": CHOSEN.steps,
        "UNROLL": CHOSEN.unroll,
        "ADDS": CHOSEN.adds,
    }
