"""Weights in pieces: together they are the whole, whatever a piece's size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import factorpack as fp
from factorpack.decoding import decode, decode_into
from factorpack.errors import FormatError
from factorpack.kinds import slices as cutting
from factorpack.kinds.slices import pieces
from factorpack.record import Encoded
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_tensor, seeded
from tests.runtime.layer_cases import METHODS

SHAPES = [(16, 8, 3, 3), (30, 24), (11, 7, 3), (40, 2, 1, 5)]


def part_shapes(encoded: Encoded) -> dict[str, tuple[int, ...]]:
    return {name: tuple(part.shape) for name, part in encoded.parts.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("numbers", [1, 70, 200])
def test_a_weight_in_pieces_is_the_whole(
    method: str, shape: tuple[int, ...], numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "LEAST_NUMBERS", numbers)
    monkeypatch.setattr(cutting, "MOST_NUMBERS", numbers)
    encoded = METHODS[method].encode(Weight(seeded(*shape)))
    weight = torch.full(shape, torch.nan)
    decode_into(encoded, weight)
    assert_close(weight, decode(encoded))
    found = pieces(encoded.kind, shape, 0, part_shapes(encoded))
    assert len(found) > 1
    assert sum(math.prod(piece.shape) for piece in found) == math.prod(shape)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(1, 600))
def test_pieces_are_no_larger_than_asked_for_or_than_one_tile(
    rows: int, columns: int, tile: int, numbers: int
) -> None:
    shape, tile = (rows, columns), min(tile, rows * columns)
    count = -(-rows * columns // tile)
    shapes = {"codebook": (tile, 1), "codebook_scale": (1, 1), "latent": (1, count), "latent_scale": (1, 1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "LEAST_NUMBERS", numbers)
        patch.setattr(cutting, "MOST_NUMBERS", numbers)
        found = pieces("factors", shape, 0, shapes)
    filled = torch.zeros(shape, dtype=torch.int64)
    for piece in found:
        assert math.prod(piece.shape) <= max(numbers, max(tile, count))
        piece.place.of(filled.view(piece.seen_as)).add_(1)
    assert bool((filled == 1).all())


def test_large_weights_are_cut_and_answer_alike() -> None:
    for method in (fp.SecondOrder(step=0.2, tile=9), fp.methods.SVD(rank=4), fp.Scalar(5)):
        encoded = method.encode(Weight(seeded(256, 64, 3, 3)))
        assert len(pieces(encoded.kind, encoded.shape, 0, part_shapes(encoded))) > 1
        weight = torch.empty(encoded.shape)
        decode_into(encoded, weight)
        assert_close(weight, decode(encoded))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_pieces_take_the_type_of_what_they_fill(dtype: torch.dtype) -> None:
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
    assert pieces(encoded.kind, encoded.shape, 2, part_shapes(encoded)) == []
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


@pytest.mark.parametrize("scale", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [6, 7])
def test_narrow_tiles_are_the_product_of_their_factors(scale: torch.dtype, count: int) -> None:
    """Two at a time where they are even and their scales FP16, one by one elsewhere; with a mean and without."""
    generator = torch.Generator().manual_seed(count)
    codebook = torch.randint(-50, 50, (9, 5), generator=generator, dtype=torch.int8)
    latent = torch.randint(-50, 50, (5, count), generator=generator, dtype=torch.int8)
    one = torch.full((1, 1), 0.25, dtype=scale)
    parts = {"codebook": codebook, "codebook_scale": one, "latent": latent, "latent_scale": one}
    expected = (codebook.double() @ latent.double() / 16).T.reshape(count, 9)
    plain = Encoded("factors", (count, 9), torch.float32, parts, {"codebook": 8, "latent": 8})
    assert_same_tensor(decode(plain), expected.float())  # sums of quarters are exact
    mean = torch.arange(9.0)[:, None]
    centred = Encoded("factors", (count, 9), torch.float32, {**parts, "mean": mean}, plain.bits)
    assert_same_tensor(decode(centred), (expected + mean.T).float())
