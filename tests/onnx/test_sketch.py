"""Codes in planes and halves of bytes: exact inverses, and nothing stored twice."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from factorpack.onnx.sketch import TYPES, Sketch, bit_planes, nibbles
from factorpack.quantize.uniform import code_dtype, code_range
from factorpack.record import DTYPES


@st.composite
def codes(draw: st.DrawFn, least: int = 1, most: int = 16) -> tuple[torch.Tensor, int]:
    width = draw(st.integers(least, most))
    drawn = draw(st.lists(st.integers(*code_range(width)), min_size=1, max_size=40))
    return torch.tensor(drawn, dtype=code_dtype(width)), width


@given(codes())
def test_planes_weighted_and_summed_are_the_codes(drawn: tuple[torch.Tensor, int]) -> None:
    values, width = drawn
    planes = bit_planes(values, width)
    assert planes.shape == (width, -(-len(values) // 8))
    bits = np.unpackbits(planes.numpy(), axis=1, bitorder="little")[:, : len(values)].astype(np.int64)
    weights = 2 ** np.arange(width)
    weights[-1] *= -1
    assert (weights @ bits).tolist() == values.tolist()


@given(codes(4, 4))
def test_halves_of_bytes_are_the_codes(drawn: tuple[torch.Tensor, int]) -> None:
    values, _ = drawn
    packed = np.frombuffer(nibbles(values), np.uint8)
    halves = np.stack([packed & 15, packed >> 4], 1).reshape(-1)[: len(values)].astype(np.int64)
    assert np.where(halves > 7, halves - 16, halves).tolist() == values.tolist()


def test_equal_values_are_stored_once_and_names_of_the_graph_are_left_free() -> None:
    sketch = Sketch(21, taken={"packed/0", "packed/2"})
    first, second = sketch.store(torch.ones(3)), sketch.store(torch.ones(3))
    assert (first, second, sketch.store(torch.ones(3, 1))) == ("packed/1", "packed/1", "packed/3")


def test_every_type_a_file_may_hold_has_its_number() -> None:
    assert set(TYPES) == set(DTYPES.values())
