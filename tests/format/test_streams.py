from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from factorpack.errors import FormatError
from factorpack.format import entropy
from factorpack.format.bitpack import bit_string_bytes
from factorpack.format.streams import (
    ANS,
    PACKED,
    RAW,
    decode_part,
    encode_part,
    estimated_part_bytes,
    raw_bytes,
    raw_size,
    split_of,
)
from factorpack.kinds.base import PartSpec
from factorpack.quantize.uniform import MAX_STORED_BITS, MIN_BITS, code_dtype, code_range
from factorpack.record import DTYPES, Encoded
from tests.helpers import assert_same_tensor, raw

BITS = range(MIN_BITS, MAX_STORED_BITS + 1)
NUMPY = {torch.int8: np.int8, torch.int16: np.int16}


@st.composite
def coded(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    bits = draw(st.sampled_from(BITS))
    low, high = code_range(bits)
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=40))
    likely = draw(st.integers(low, high))
    elements = st.one_of(st.just(likely), st.integers(low, high))
    held = NUMPY[code_dtype(bits)]
    drawn = draw(hnp.arrays(held, shape, elements=elements, fill=st.just(likely)))
    return torch.from_numpy(drawn), bits


@given(coded())
def test_codes_come_back_and_never_outgrow_fixed_width(case: tuple[torch.Tensor, int]):
    codes, bits = case
    codec, data = encode_part(codes, bits)
    assert codec in (PACKED, ANS)
    assert len(data) <= bit_string_bytes(codes.numel(), bits)
    assert_same_tensor(decode_part(codec, data, PartSpec(tuple(codes.shape), code_dtype(bits), bits)), codes)
    assert encode_part(codes.clone(), bits) == (codec, data)
    assert abs(estimated_part_bytes(codes, bits) - len(data)) <= 16


@pytest.mark.parametrize("apart", [239, 240, 60000])
def test_codes_far_apart_are_not_entropy_coded_in_vain(apart: int):
    codes = torch.full((1, 15), -30000, dtype=torch.int16)
    codes[0, 0] += apart
    calls = []

    def encode(*given: object) -> bytes:
        calls.append(given)
        return entropy.encode(*given[:2])  # type: ignore[arg-type]

    assert encode_part(codes, 16, encode=encode)[0] == PACKED
    assert len(calls) == (apart < 8 * 30)
    assert len(entropy.encode(codes.numpy())) > 30


@pytest.mark.parametrize("bits", BITS)
def test_every_code_of_every_width(bits: int):
    low, high = code_range(bits)
    codes = torch.arange(low, high + 1).to(code_dtype(bits)).reshape(1, -1)
    codec, data = encode_part(codes, bits)
    assert codec == PACKED
    assert len(data) == bit_string_bytes(1 << bits, bits)
    assert_same_tensor(decode_part(codec, data, PartSpec((1, 1 << bits), code_dtype(bits), bits)), codes)


def test_entropy_coding_is_chosen_where_it_is_shorter():
    codes = torch.zeros(50, 50, dtype=torch.int8)
    assert encode_part(codes, 4) == (ANS, bytes([8, 0, 0, 0, 0]))


@pytest.mark.parametrize("bits", range(MIN_BITS, MAX_STORED_BITS))
@pytest.mark.parametrize("end", [0, 1])
def test_codes_outside_their_width_are_not_written(bits: int, end: int):
    code = code_range(bits)[end] + (-1, 1)[end]
    with pytest.raises(FormatError, match=f"codes {code} to {code} do not fit {bits} bits"):
        encode_part(torch.full((3, 3), code, dtype=torch.int16), bits)


@given(st.sampled_from(list(DTYPES.values())), st.data())
def test_raw_values_of_every_type_come_back_bit_for_bit(dtype: torch.dtype, data: st.DataObject):
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    stored = data.draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        stored = bytes(byte & 1 for byte in stored)
    spec = PartSpec(shape, dtype)
    values = decode_part(RAW, stored, spec)
    assert (tuple(values.shape), values.dtype) == (shape, dtype)
    codec, coded = encode_part(values, 0)
    assert coded == stored if codec == RAW else len(coded) < size
    assert raw(decode_part(codec, coded, spec)) == stored
    assert raw(values) == stored
    assert raw_size(spec) == size


def test_raw_values_are_written_row_by_row():
    matrix = torch.arange(6, dtype=torch.int8).reshape(2, 3)
    assert raw_bytes(matrix.T) == bytes([0, 3, 1, 4, 2, 5])
    assert raw_bytes(torch.tensor([258], dtype=torch.int16)) == bytes([2, 1])


def test_raw_values_of_one_number_with_a_stride():
    assert raw_bytes(torch.tensor([[1.0, 2.0], [3.0, 4.0]])[1:, 1]) == raw(torch.tensor([4.0]))


def test_raw_values_of_lazy_conjugates_and_negatives():
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    assert raw_bytes(numbers.conj()) == raw(torch.tensor([1 - 2j, 3 + 4j]))
    assert raw_bytes(numbers[:1].conj().imag) == raw(torch.tensor([-2.0]))


def factors(shape: tuple[int, ...], tile: int, groups: int = 0) -> Encoded:
    count = -(-int(np.prod(shape)) // tile)
    parts = {"codebook": torch.zeros(tile, 2).char(), "latent": torch.zeros(2, count).char()}
    return Encoded("factors", shape, torch.float32, parts, {"codebook": 4, "latent": 4}, groups)


@pytest.mark.parametrize(
    ("shape", "tile", "groups", "split"),
    [
        ((12, 5, 3, 3), 9, 0, 12),
        ((12, 5, 3, 3), 45, 0, 12),
        ((12, 5, 3, 3), 15, 0, 12),
        ((12, 5, 3, 3), 16, 0, 0),  # tiles that cross filters
        ((12, 5, 3, 3), 90, 0, 0),
        ((1, 5, 3, 3), 9, 0, 0),  # one channel is no split
        ((4, 3, 4, 4), 16, 2, 6),
        ((4, 3, 4, 4), 32, 2, 6),
        ((4, 3, 4, 4), 64, 2, 0),  # a filter has 32 numbers
        ((40,), 1, 0, 40),
    ],
)
def test_a_latent_splits_by_output_channel(shape: tuple[int, ...], tile: int, groups: int, split: int):
    encoded = factors(shape, tile, groups)
    assert split_of(encoded, "latent") == split
    assert split_of(encoded, "codebook") == 0
    assert split == 0 or encoded.parts["latent"].shape[1] % split == 0


@pytest.mark.parametrize(
    ("shape", "tile", "split"), [((12, 4, 3, 3), 9, 12), ((12, 8), 4, 12), ((12, 7), 4, 0)]
)
def test_indices_split_by_output_channel_where_tiles_divide_a_filter(
    shape: tuple[int, ...], tile: int, split: int
):
    count = -(-torch.Size(shape).numel() // tile)
    parts = {"codebook": torch.ones(5, tile), "indices": torch.full((1, count), -4, dtype=torch.int8)}
    encoded = Encoded("codewords", shape, torch.float32, parts, {"indices": 3})
    assert split_of(encoded, "indices") == split
    assert split_of(encoded, "codebook") == 0


def test_other_kinds_do_not_split():
    encoded = Encoded("scalar", (3, 4), torch.float32, {"codes": torch.zeros(3, 4).char()}, {"codes": 4})
    assert split_of(encoded, "codes") == 0


@given(coded(), st.data())
def test_any_split_comes_back(case: tuple[torch.Tensor, int], data: st.DataObject):
    codes, bits = case
    columns = codes.shape[1]
    split = data.draw(st.sampled_from([s for s in range(1, columns + 1) if columns % s == 0]))
    codec, stream = encode_part(codes, bits, split)
    spec = PartSpec(tuple(codes.shape), code_dtype(bits), bits)
    assert_same_tensor(decode_part(codec, stream, spec), codes)
    assert abs(estimated_part_bytes(codes, bits, split) - len(stream)) <= 16


def test_what_is_no_code_is_estimated_exactly():
    assert estimated_part_bytes(torch.zeros(3, 5, dtype=torch.float16), 0) == 30


@pytest.mark.parametrize("length", [0, 7, 9])
def test_raw_of_another_length_is_refused(length: int):
    with pytest.raises(FormatError, match=rf"{length} bytes for values of shape \(2,\)"):
        decode_part(RAW, bytes(length), PartSpec((2,), torch.float32))


@pytest.mark.parametrize("byte", [2, 128, 255])
def test_a_boolean_is_zero_or_one(byte: int):
    with pytest.raises(FormatError, match="neither 0 nor 1"):
        decode_part(RAW, bytes([1, byte, 0]), PartSpec((3,), torch.bool))
