"""A kernel for products with packed rows of codes: cells become floats in registers and are multiplied there.

An unsigned code u is exact in the mantissa of a float whose lowest bit is worth 1: 128 + u in BF16, 1024 + u
in FP16. So a code costs a shift, a mask that also sets the exponent, and a subtraction, each for two codes at
once in the inline assembly. A conversion from integers would take several times as long.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from factorpack.runtime.code_rows import as_cells, fields, row_cells
from factorpack.runtime.launching import Prepared

UNSUITED = (triton.OutOfResources, triton.CompilationError)
"""What is raised, before anything runs, where a GPU or a version of triton cannot run the kernel."""
SUMMED, MOST_SPLITS = 64, 64
"""Outputs whose partial sums one program adds up, and the most sums per output."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work is divided: a program computes `rows` x `batch` outputs, `cells` cells of a row at a time."""

    rows: int
    batch: int
    cells: int
    warps: int
    stages: int
    programs: float
    """Programs per multiprocessor to aim for: rows are split until there are as many."""
    side: int = 1
    """Warps that take `cells` each, side by side, and add up their sums: all warps, or 1 for none."""

    @property
    def step(self) -> int:
        """Cells that a program advances by."""
        return self.cells * self.side

    def splits(self, rows: int, cells: int, batch: int, processors: int) -> int:
        """Splits of a row that are summed separately."""
        blocks: int = triton.cdiv(rows, self.rows) * triton.cdiv(batch, self.batch)
        most: int = min(triton.cdiv(cells, self.step), MOST_SPLITS)
        return max(1, min(round(self.programs * processors / blocks), most))


@triton.jit  # type: ignore[untyped-decorator]
def _floats(cells, SHIFT: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, PAIRED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes at one position of the cells, in FP16 if HALF, else in BF16."""
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    MASK: tl.constexpr = (1 << BITS) - 1
    if BITS == 8:
        if HALF:
            unsigned = (cells.to(tl.int16) + OFFSET) & MASK
            numbers = (unsigned | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
        else:
            numbers = cells.to(tl.bfloat16)
    elif PAIRED and HALF:
        numbers = tl.inline_asm_elementwise(
            f"{{ .reg .b32 u, c; shr.u32 u, $1, {SHIFT}; lop3.b32 u, u, {MASK * 65537}, {0x64006400}, 0xea; "
            f"mov.b32 c, {(0x6400 | OFFSET) * 65537}; sub.f16x2 $0, u, c; }}",
            "=r,r",
            [cells],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    elif PAIRED:  # u 1 - c, for GPUs that cannot add or subtract pairs of BF16
        numbers = tl.inline_asm_elementwise(
            f"{{ .reg .b32 u, c, i; shr.u32 u, $1, {SHIFT}; lop3.b32 u, u, {MASK * 65537}, {0x43004300}, 0xea; "
            f"mov.b32 c, {(0xC300 | OFFSET) * 65537}; mov.b32 i, {0x3F803F80}; fma.rn.bf16x2 $0, u, i, c; }}",
            "=r,r",
            [cells],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif HALF:
        unsigned = (cells >> SHIFT) & MASK
        numbers = (unsigned | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
    else:
        unsigned = (cells >> SHIFT) & MASK
        numbers = (unsigned | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - (128.0 + OFFSET)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _left_over(first, second, third, PAIRED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 3-bit code that the highest bits of three cells make."""
    if PAIRED:
        numbers = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c; shr.u32 a, $1, 15; shr.u32 b, $2, 14; shr.u32 c, $3, 13; "
            "and.b32 a, a, 0x00010001; and.b32 b, b, 0x00020002; and.b32 c, c, 0x00040004; "
            "or.b32 a, a, b; or.b32 $0, a, c; }",
            "=r,r,r,r",
            [first, second, third],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    else:
        numbers = ((first >> 15) & 1) | ((second >> 14) & 2) | ((third >> 13) & 4)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _load_cells(cells, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(cells) if EVEN else tl.load(cells, inside, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _add_products(  # type: ignore[no-untyped-def]
    total,
    cells,
    inputs,
    own,
    place,
    inside,
    K,
    H,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """`total` plus the products of the COUNT codes of each cell, whose lowest is code FIRST of all."""
    for field in tl.static_range(COUNT):
        column = (FIRST + field) * H + place
        here = own if EVEN else own & inside & (column < K)
        values = tl.load(inputs + column, here, 0.0)
        turned = tl.trans(values) if len(values.shape) == 2 else tl.permute(values, 0, 2, 1)
        total = tl.dot(_floats(cells, BITS * field, BITS, HALF, PAIRED), turned, total)
    return total


@triton.jit(do_not_specialize=["batch", "scale_stride"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    inputs,
    cells,
    scale,
    out,
    batch,
    N,
    K,
    H,
    split_cells,
    scale_stride,
    BITS: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    CELLS: tl.constexpr,
    SIDE: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """One program: ROWS x BATCH outputs from one split of the rows, `split_cells` cells of H.

    Tiles are (rows or batch, cells) or, with warps side by side, (SIDE, rows or batch, cells).
    """
    HALF: tl.constexpr = inputs.dtype.element_ty == tl.float16
    PARTS: tl.constexpr = 3 if BITS == 3 else 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    one = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    if SIDE == 1:
        at_row, at_one = (row % N)[:, None], one[:, None]
        offset = tl.arange(0, CELLS)[None, :]
        total = tl.zeros([ROWS, BATCH], tl.float32)
    else:
        at_row, at_one = (row % N)[None, :, None], one[None, :, None]
        offset = tl.arange(0, SIDE)[:, None, None] * CELLS + tl.arange(0, CELLS)[None, None, :]
        total = tl.zeros([SIDE, ROWS, BATCH], tl.float32)
    own = at_one < batch
    inputs += at_one.to(tl.int64) * K
    cells += at_row.to(tl.int64) * H * PARTS
    first = tl.program_id(2) * split_cells
    for start in range(first, min(first + split_cells, H), CELLS * SIDE):
        place = start + offset
        inside = place < H
        a = _load_cells(cells + place, inside, EVEN)
        if BITS == 3:
            b = _load_cells(cells + (H + place), inside, EVEN)
            c = _load_cells(cells + (2 * H + place), inside, EVEN)
            total = _add_products(total, a, inputs, own, place, inside, K, H, 0, 5, BITS, HALF, PAIRED, EVEN)
            total = _add_products(total, b, inputs, own, place, inside, K, H, 5, 5, BITS, HALF, PAIRED, EVEN)
            total = _add_products(total, c, inputs, own, place, inside, K, H, 10, 5, BITS, HALF, PAIRED, EVEN)
            left = _left_over(a, b, c, PAIRED)
            total = _add_products(
                total, left, inputs, own, place, inside, K, H, 15, 1, BITS, HALF, PAIRED, EVEN
            )
        else:
            total = _add_products(
                total, a, inputs, own, place, inside, K, H, 0, FIELDS, BITS, HALF, PAIRED, EVEN
            )
    if SIDE > 1:
        total = tl.sum(total, 0)
    if SCALED:
        total *= tl.load(scale + (row % N) * scale_stride).to(tl.float32)[:, None]
    out += tl.program_id(2).to(tl.int64) * batch * N + one[None, :].to(tl.int64) * N + row[:, None]
    tl.store(out, total.to(out.dtype.element_ty), (one < batch)[None, :] & (row < N)[:, None])


@triton.jit(do_not_specialize=["count", "scale_stride"])  # type: ignore[untyped-decorator]
def add_splits(  # type: ignore[no-untyped-def]
    sums, scale, out, N, count, scale_stride, SCALED: tl.constexpr, SUMMED: tl.constexpr, MOST: tl.constexpr
):
    """One program: SUMMED outputs of one sample, from `count` <= MOST partial sums that are read at once."""
    row = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED)
    here = row < N
    at = tl.program_id(1).to(tl.int64) * N + row
    split = tl.arange(0, MOST)[:, None]
    size = tl.num_programs(1).to(tl.int64) * N
    total = tl.sum(tl.load(sums + split * size + at[None, :], here[None, :] & (split < count), 0.0), 0)
    if SCALED:
        total *= tl.load(scale + row * scale_stride, here, 0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), here)


@dataclass(frozen=True, slots=True)
class _Product:
    """A product's shape, and the launches that compute it: of the sums of splits, and of what adds these up."""

    splits: int
    multiply: Prepared
    add: Prepared | None


def multiply_rows(
    inputs: Tensor, packed: Tensor, bits: int, scale: Tensor | None, launch: Launch | None = None
) -> Tensor:
    """See multiply.py."""
    batch, columns = inputs.shape
    rows, scales = len(packed), 0 if scale is None else len(scale)
    inputs, packed = inputs.contiguous(), packed.contiguous()
    product = _prepare(bits, batch, rows, columns, scales, launch, inputs.device)
    out = torch.empty(batch, rows, dtype=inputs.dtype, device=inputs.device)
    cells = as_cells(packed, bits)
    if product.add is None:
        product.multiply.launch(inputs, cells, scale, out)
        return out
    sums = torch.empty(product.splits, batch, rows, dtype=torch.float32, device=inputs.device)
    product.multiply.launch(inputs, cells, scale, sums)
    product.add.launch(sums, scale, out)
    return out


@functools.lru_cache(4096)
def _prepare(
    bits: int, batch: int, rows: int, columns: int, scales: int, launch: Launch | None, device: torch.device
) -> _Product:
    count, launch = row_cells(columns, bits), launch or chosen(bits, batch, rows * columns)
    splits = launch.splits(rows, count, batch, _processors(device))
    split_cells = triton.cdiv(triton.cdiv(count, launch.step), splits) * launch.step
    splits = triton.cdiv(count, split_cells)
    scale_stride = int(scales > 1)
    constants = {
        "BITS": bits,
        "FIELDS": fields(bits),
        "ROWS": launch.rows,
        "BATCH": launch.batch,
        "CELLS": launch.cells,
        "SIDE": launch.side,
        "EVEN": count % launch.step == 0 and columns == fields(bits) * count,
        "SCALED": splits == 1 and scales > 0,
        "PAIRED": torch.version.cuda is not None,  # NVIDIA's own instructions, which the interpreter lacks
    }
    multiply = Prepared(
        _multiply,
        (triton.cdiv(rows, launch.rows), triton.cdiv(batch, launch.batch), splits),
        (batch, rows, columns, count, split_cells, scale_stride),
        constants,
        {"num_warps": launch.warps, "num_stages": launch.stages},
    )
    if splits == 1:
        return _Product(splits, multiply, None)
    added = {"SCALED": scales > 0, "SUMMED": SUMMED, "MOST": triton.next_power_of_2(splits)}
    numbers = (rows, splits, scale_stride)
    return _Product(
        splits,
        multiply,
        Prepared(add_splits, (triton.cdiv(rows, SUMMED), batch, 1), numbers, added, {"num_warps": 4}),
    )


def chosen(bits: int, batch: int, codes: int) -> Launch:
    """The launch for a product. benchmarks/studies/kernels.py searches for the fastest on a GPU."""
    sizes = LAUNCHES[bits]
    small, large = sizes[next((size for size in sorted(sizes) if batch <= size), max(sizes))]
    return small if codes < LARGE else large


LARGE = 3 << 24
"""A matrix with at least as many codes counts as large."""
LAUNCHES: dict[int, dict[int, tuple[Launch, Launch]]] = {
    2: {
        2: (Launch(64, 2, 64, 4, 3, 4), Launch(64, 2, 64, 4, 3, 4)),
        4: (Launch(64, 4, 64, 4, 3, 4), Launch(64, 4, 64, 4, 3, 4)),
        8: (Launch(64, 8, 64, 4, 3, 4), Launch(64, 8, 64, 4, 3, 4)),
        16: (Launch(64, 16, 32, 4, 3, 4), Launch(64, 16, 32, 4, 3, 4)),
        64: (Launch(64, 32, 32, 4, 3, 4), Launch(64, 32, 32, 4, 3, 4)),
    },
    3: {
        2: (Launch(16, 2, 64, 2, 3, 4, side=2), Launch(16, 2, 64, 2, 3, 1, side=2)),
        4: (Launch(32, 8, 64, 2, 3, 1), Launch(32, 8, 64, 2, 3, 4)),
        8: (Launch(32, 8, 64, 2, 3, 1), Launch(32, 8, 64, 2, 3, 4)),
        16: (Launch(32, 16, 64, 2, 3, 1), Launch(32, 16, 64, 2, 3, 1)),
        64: (Launch(64, 32, 32, 2, 3, 1), Launch(64, 32, 32, 2, 3, 1)),
    },
    4: {
        2: (Launch(16, 2, 64, 2, 4, 1, side=2), Launch(16, 2, 128, 2, 3, 1, side=2)),
        4: (Launch(16, 8, 64, 2, 4, 1, side=2), Launch(32, 8, 64, 4, 4, 1, side=4)),
        8: (Launch(16, 8, 64, 2, 4, 1, side=2), Launch(16, 8, 64, 2, 4, 4, side=2)),
        16: (Launch(32, 16, 128, 2, 3, 1), Launch(64, 16, 64, 2, 4, 4)),
        64: (Launch(32, 32, 64, 2, 3, 1), Launch(64, 64, 64, 4, 3, 2)),
    },
    8: {
        2: (Launch(64, 2, 128, 4, 4, 4), Launch(64, 2, 128, 4, 4, 4)),
        4: (Launch(64, 4, 128, 4, 4, 4), Launch(64, 4, 128, 4, 4, 4)),
        8: (Launch(64, 8, 128, 4, 4, 4), Launch(64, 8, 128, 4, 4, 4)),
        16: (Launch(64, 16, 128, 4, 4, 4), Launch(64, 16, 128, 4, 4, 4)),
        64: (Launch(128, 64, 128, 4, 3, 2), Launch(128, 64, 128, 4, 3, 2)),
    },
}
"""Bits per code -> largest batch -> the launch for small and for large matrices.

Those for 3 and 4 bits were the fastest on an H200; the others were not searched.
"""


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
