"""The GPU's kernel for products with packed codes against FP64: on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from factorpack.quantize.uniform import code_range
from factorpack.runtime.code_rows import WIDTHS, pack_rows
from tests.helpers import relative_error, seeded
from tests.runtime import triton_interpreter

pytest.importorskip("triton", reason="the kernel needs triton, which comes with CUDA builds of torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)


@pytest.fixture(autouse=True)
def whole_language(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        triton_interpreter.complete(monkeypatch)


SHAPES = [(1, 1), (20, 256), (33, 300), (70, 515), (16, 1024)]
"""Rows and columns: one of each, whole tiles, and tails of rows, cells and columns."""


def case(bits: int, rows: int, columns: int, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes that take every value of their width, inputs, and the exact product."""
    low, high = code_range(bits)
    codes = torch.arange(rows * columns).mul(7919).remainder(high - low + 1).add(low).reshape(rows, columns)
    inputs = seeded(batch, columns).to(dtype)
    return codes.to(torch.int8).to(DEVICE), inputs.to(DEVICE), inputs.double() @ codes.double().T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_codes(bits: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from factorpack.runtime.multiply_triton import Launch, multiply_rows

    for batch, programs, side in ((1, 1.0, 2), (9, 9.0, 1)):
        codes, inputs, expected = case(bits, *shape, batch, dtype)
        launch = Launch(rows=32, batch=8, cells=32, warps=side, stages=2, programs=programs, side=side)
        found = multiply_rows(inputs, pack_rows(codes, bits), bits, None, launch)
        assert found.dtype == dtype
        assert relative_error(found.cpu(), expected) < torch.finfo(dtype).eps


@pytest.mark.parametrize("pieces", [1.0, 2.0])
@pytest.mark.parametrize("scales", [1, 40])
def test_scales_are_applied_to_whole_sums(scales: int, pieces: float) -> None:
    """FP16 holds neither these scales nor the sums they are applied to."""
    from factorpack.runtime.multiply_triton import Launch, multiply_rows

    codes, inputs, _ = case(8, 40, 4096, 2, torch.float16)
    codes, inputs = codes.abs().clamp(max=127), 100 * inputs.abs()
    scale = 1e-8 * (1 + seeded(scales).abs()).to(DEVICE)
    launch = Launch(rows=16, batch=16, cells=128, warps=1, stages=2, programs=3 * pieces)
    found = multiply_rows(inputs, pack_rows(codes, 8), 8, scale, launch)
    exact = inputs.cpu().double() @ codes.cpu().double().T
    assert exact.max() > torch.finfo(torch.float16).max
    assert relative_error(found.cpu(), exact * scale.cpu().double()) < torch.finfo(torch.float16).eps


def test_a_row_is_cut_into_as_many_pieces_as_fill_the_processors() -> None:
    from factorpack.runtime.multiply_triton import Launch

    launch = Launch(rows=64, batch=16, cells=32, warps=4, stages=2, programs=2)
    assert launch.splits(rows=4096, cells=1024, batch=1, processors=132) == 4
    assert launch.splits(rows=4096, cells=64, batch=1, processors=132) == 2  # no piece is empty
    assert launch.splits(rows=64, cells=32768, batch=1, processors=132) == 64  # nor are there too many to add
    assert launch.splits(rows=65536, cells=1024, batch=64, processors=132) == 1
    beside = Launch(rows=64, batch=16, cells=32, warps=4, stages=2, programs=2, side=4)
    assert beside.splits(rows=4096, cells=256, batch=1, processors=132) == 2
