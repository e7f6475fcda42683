"""Weights in slices: together they are the whole, whatever the size of a slice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import factorpack as fp
from factorpack.decoding import decode, decode_into
from factorpack.errors import FormatError
from factorpack.kinds import KINDS
from factorpack.kinds import slices as cutting
from factorpack.kinds.slices import Slice
from factorpack.record import Encoded
from factorpack.tiles import Layout
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_tensor, seeded
from tests.runtime.layer_cases import METHODS

SHAPES = [(16, 8, 3, 3), (30, 24), (11, 7, 3), (40, 2, 1, 5)]


def cut(encoded: Encoded) -> list[Slice]:
    shapes = {name: tuple(part.shape) for name, part in encoded.parts.items()}
    return KINDS[encoded.kind].cut(encoded.layout, shapes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("elements", [1, 70, 200])
def test_a_weight_in_slices_is_the_whole(
    method: str, shape: tuple[int, ...], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "LEAST_ELEMENTS", elements)
    monkeypatch.setattr(cutting, "MOST_ELEMENTS", elements)
    encoded = METHODS[method].encode(Weight(seeded(*shape)))
    weight = torch.full(shape, torch.nan)
    decode_into(encoded, weight)
    assert_close(weight, decode(encoded))
    found = cut(encoded)
    assert len(found) > 1
    assert sum(math.prod(each.shape) for each in found) == math.prod(shape)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(1, 600))
def test_slices_are_no_larger_than_requested_or_than_one_tile(
    rows: int, columns: int, tile: int, elements: int
) -> None:
    shape, tile = (rows, columns), min(tile, rows * columns)
    count = -(-rows * columns // tile)
    shapes = {"codebook": (tile, 1), "codebook_scale": (1, 1), "latent": (1, count), "latent_scale": (1, 1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LEAST_ELEMENTS", elements)
        patch.setattr(cutting, "MOST_ELEMENTS", elements)
        found = KINDS["factors"].cut(Layout(shape), shapes)
    filled = torch.zeros(shape, dtype=torch.int64)
    for each in found:
        assert math.prod(each.shape) <= max(elements, max(tile, count))
        each.place.of(filled.view(each.view_shape)).add_(1)
    assert bool((filled == 1).all())


def test_large_weights_are_cut_and_decode_to_the_same() -> None:
    for method in (fp.SecondOrder(step=0.2, tile=9), fp.methods.SVD(rank=4), fp.Scalar(5)):
        encoded = method.encode(Weight(seeded(256, 64, 3, 3)))
        assert len(cut(encoded)) > 1
        weight = torch.empty(encoded.shape)
        decode_into(encoded, weight)
        assert_close(weight, decode(encoded))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_slices_take_the_type_of_what_they_fill(dtype: torch.dtype) -> None:
    encoded = fp.Scalar(5).encode(Weight(seeded(300, 300)))
    weight = torch.empty(encoded.shape, dtype=dtype)
    decode_into(encoded, weight)
    assert_same_tensor(weight, decode(encoded).to(dtype))


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_kept_and_constant_tensors_fill_theirs(shape: tuple[int, ...]) -> None:
    values = torch.arange(math.prod(shape)).reshape(shape)
    kept = Encoded("keep", shape, torch.int64, {"values": values})
    constant = Encoded("constant", shape, torch.int64, {"value": torch.tensor([7])})
    for encoded, expected in ((kept, values), (constant, torch.full(shape, 7))):
        found = torch.zeros(shape, dtype=torch.int64)
        decode_into(encoded, found)
        assert_same_tensor(found, expected)


def test_transposed_convolutions_come_whole() -> None:
    encoded = fp.QSPCA(4, 3, tile=8).encode(Weight(seeded(8, 3, 3, 3), 2))
    assert cut(encoded) == []
    weight = torch.empty(encoded.shape)
    decode_into(encoded, weight)
    assert_same_tensor(weight, decode(encoded))


def test_an_index_beyond_its_table_is_refused_before_anything_is_written() -> None:
    encoded = fp.methods.VQ(8, tile=4, iterations=1).encode(Weight(seeded(16, 16)))
    encoded.parts["codebook"].resize_(5, 4)
    weight = torch.zeros(encoded.shape)
    with pytest.raises(FormatError, match="indices"):
        decode_into(encoded, weight)
    assert not weight.any()
