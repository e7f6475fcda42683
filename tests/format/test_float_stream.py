from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factorpack.errors import FormatError
from factorpack.format import entropy, float_stream, streams
from factorpack.format.encode_workers import encode_codes
from factorpack.format.float_stream import LEAST_BYTES
from factorpack.format.streams import FLOATS, RAW, decode_part, encode_part
from factorpack.kinds.base import PartSpec
from factorpack.quantize.mantissas import FLOAT_TYPES
from factorpack.record import dtype_name
from tests.format.reference import floats_decode
from tests.helpers import assert_same_tensor, raw, seeded

TYPES = list(FLOAT_TYPES)


@st.composite
def floats(draw: st.DrawFn) -> torch.Tensor:
    """Any bits at all, with some of the lowest zero."""
    dtype = draw(st.sampled_from(TYPES))
    whole = draw(st.binary(min_size=dtype.itemsize, max_size=80 * dtype.itemsize))
    held = FLOAT_TYPES[dtype].held
    bits = np.frombuffer(whole[: len(whole) // dtype.itemsize * dtype.itemsize], held)
    kept = draw(st.integers(0, 8 * dtype.itemsize))
    return torch.from_numpy((bits >> kept << kept).astype(held).view(np.uint8)).view(dtype)


def stream(values: torch.Tensor) -> bytes:
    return float_stream.encode(raw(values), FLOAT_TYPES[values.dtype], encode_codes)


@given(floats())
def test_floats_come_back_bit_for_bit(values: torch.Tensor):
    data = stream(values)
    back = decode_part(FLOATS, data, PartSpec(tuple(values.shape), values.dtype))
    assert_same_tensor(back, values)
    assert floats_decode(data, values.numel(), dtype_name(values.dtype)) == raw(values)
    assert len(data) >= LEAST_BYTES


@pytest.mark.parametrize("dtype", TYPES)
def test_every_sign_and_exponent_with_the_ends_of_the_mantissas(dtype: torch.dtype):
    kind = FLOAT_TYPES[dtype]
    high = np.arange(1 << kind.exponent_bits + 1, dtype=np.uint32) << kind.mantissa_bits
    bits = np.concatenate([high | low for low in (0, 1, (1 << kind.mantissa_bits) - 1)]).astype(kind.held)
    values = torch.from_numpy(bits.view(np.uint8)).view(dtype)
    assert values.isnan().any()
    assert_same_tensor(decode_part(FLOATS, stream(values), PartSpec(tuple(values.shape), dtype)), values)


@pytest.mark.parametrize(("dtype", "used"), [(torch.float16, 10), (torch.bfloat16, 7), (torch.float32, 23)])
def test_only_bits_that_are_used_are_stored(dtype: torch.dtype, used: int):
    """Values from 1 to 2 have one exponent, which takes five bytes in all."""
    for bits in range(used + 1):
        values = (1 + torch.arange(200, dtype=torch.float64) % (1 << bits) / (1 << bits)).to(dtype)
        values[7] = 2 - 2.0**-bits
        lengths = [(200 * width + 7) // 8 for width in (min(bits, 16), bits - min(bits, 16))]
        assert len(stream(values)) == LEAST_BYTES + sum(lengths)


@pytest.mark.parametrize("dtype", TYPES)
def test_floats_are_coded_where_that_is_shorter(dtype: torch.dtype):
    values = (0.1 * seeded(4, 250)).to(dtype)
    codec, data = encode_part(values, 0)
    assert codec == FLOATS
    assert len(data) < 0.9 * len(raw(values))
    assert_same_tensor(decode_part(codec, data, PartSpec((4, 250), dtype)), values)
    assert encode_part(values[:, :2], 0)[0] == RAW


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int16, torch.bool]
)
def test_other_types_are_raw(dtype: torch.dtype):
    assert encode_part(torch.ones(500).to(dtype), 0)[0] == RAW


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_cannot_get_shorter_is_not_tried(count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(float_stream, "encode", None)
    values = torch.ones(count, dtype=torch.float16)
    assert encode_part(values, 0) == (RAW, raw(values))


def test_large_parts_are_raw(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "_MOST_FLOATS", 99)
    assert [encode_part(torch.ones(count), 0)[0] for count in (99, 100)] == [FLOATS, RAW]


HALF = PartSpec((40,), torch.float16)
VALID = stream(torch.linspace(-1, 1, 40).half())
ENDS = len(VALID) - 50  # where mantissas of ten bits begin


def refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decode_part(FLOATS, data, HALF)


def test_hostile_streams():
    assert VALID[0] == 10
    for length in (0, 1):
        refused(VALID[:length], f"a stream of floats of {length} bytes has no header")
    refused(b"\x0b" + VALID[1:], "floats of 11 mantissa bits and exponents up to 15, allowed are 10 bits")
    refused(VALID[:1] + b"\x20" + VALID[2:], "exponents up to 32, allowed are 10 bits and exponents below 32")
    refused(VALID[:40], "40 bytes for 40 floats of 10 mantissa bits")
    refused(VALID[:52], "has no header")
    refused(VALID[:1] + b"\0" + VALID[2:], r"codes -?\d+ to \d+ of exponents that are 0 and lower")
    refused(VALID[:ENDS] + b"\1\0\0\0" + VALID[ENDS:], "longer than its codes")


def test_bits_behind_the_last_mantissa():
    """Five mantissas of one bit leave three."""
    data = bytes([1, 15]) + entropy.encode(np.zeros((1, 5), np.int16))
    spec = PartSpec((5,), torch.float16)
    assert decode_part(FLOATS, data + b"\x1f", spec).tolist() == [1.5] * 5
    with pytest.raises(FormatError, match="bits are set after the last value"):
        decode_part(FLOATS, data + b"\x20", spec)
