"""Kept tensors: bit for bit, or rounded to a smaller float and never past its range."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from factorpack.decoding import decode
from factorpack.errors import PlanError, WeightError
from factorpack.methods import Keep
from factorpack.record import DTYPES
from factorpack.weight import Weight
from tests.helpers import assert_same_tensor, seeded


def values(dtype: torch.dtype) -> Tensor:
    return (seeded(3, 5) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (15,), (1, 3, 5)])
def test_every_type_is_kept_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype).reshape(shape)
    assert_same_tensor(decode(Keep().encode(Weight(tensor))), tensor)


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.empty(0), torch.empty(4, 0, 2), torch.tensor(7)])
def test_single_numbers_and_empty_tensors(tensor: Tensor) -> None:
    assert_same_tensor(decode(Keep().encode(Weight(tensor))), tensor)


def test_nan_infinity_and_signed_zero_are_kept() -> None:
    tensor = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    assert_same_tensor(decode(Keep().encode(Weight(tensor))), tensor)


def test_views_are_stored_as_they_read() -> None:
    tensor = seeded(4, 6)[:, ::2].T
    encoded = Keep().encode(Weight(tensor))
    assert encoded.parts["values"].is_contiguous()
    assert_same_tensor(decode(encoded), tensor)


@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
@pytest.mark.parametrize("as_name", [True, False])
def test_rounding_to_a_float_type(name: str, as_name: bool) -> None:
    tensor = values(torch.float32)
    encoded = Keep(name if as_name else DTYPES[name]).encode(Weight(tensor))
    assert encoded.parts["values"].dtype == DTYPES[name]
    assert_same_tensor(decode(encoded), tensor.to(DTYPES[name]).to(torch.float32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_only_floats_are_rounded(dtype: torch.dtype) -> None:
    tensor = values(dtype)
    assert_same_tensor(Keep("float16").encode(Weight(tensor)).parts["values"], tensor)


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.tensor([70000.0]), "float16"),
        (torch.tensor([1e300], dtype=torch.float64), "float32"),
        (torch.tensor([3.4e38]), "bfloat16"),
        (torch.tensor([-500.0]), "float8_e4m3fn"),  # torch clips to 448, without a word
        (torch.tensor([1e5]), "float8_e5m2"),
        (torch.tensor([65504.0], dtype=torch.float16), "bfloat16"),  # 65536 on the way back
    ],
)
def test_what_does_not_fit_is_refused(tensor: Tensor, dtype: str) -> None:
    with pytest.raises(WeightError, match=f"overflow torch.{dtype}"):
        Keep(dtype).encode(Weight(tensor))


def test_infinity_is_no_overflow() -> None:
    tensor = torch.tensor([torch.inf, 1.0, torch.nan])
    assert str(decode(Keep("float16").encode(Weight(tensor))).tolist()) == "[inf, 1.0, nan]"


def test_neither_the_source_nor_a_decoded_tensor_is_shared() -> None:
    """Training on, on either side, must not change what has been packed."""
    source = torch.zeros(3)
    encoded = Keep().encode(Weight(source))
    source += 1
    decode(encoded).add_(2)
    assert_same_tensor(decode(encoded), torch.zeros(3))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float15", "unknown dtype 'float15', known are float64, float32, float16"),
        (["float16"], r"unknown dtype \['float16'\], known are"),
        (16, "unknown dtype 16, known are"),
        ("int8", "rounds to one of float64, float32, .*, not to int8"),
        (torch.int32, "not to torch.int32"),
        (torch.float8_e4m3fnuz, "not to torch.float8_e4m3fnuz"),  # a file has no name for it
    ],
)
def test_impossible_settings(dtype: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Keep(dtype)


def test_a_type_no_file_knows() -> None:
    with pytest.raises(WeightError, match=r"torch.float8_e4m3fnuz cannot be stored, known are"):
        Keep().encode(Weight(torch.zeros(3, dtype=torch.float8_e4m3fnuz)))


@pytest.mark.parametrize(("dtype", "lost"), [("float16", 2), ("float8_e4m3fn", 3), ("bfloat16", 0)])
def test_values_that_become_zero_are_counted(dtype: str, lost: int) -> None:
    values = torch.tensor([1.0, 0.0, 2e-8, -1e-9, 1e-4])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Keep(dtype).encode(Weight(values))
    said = [str(each.message) for each in caught]
    assert len(said) == (1 if lost else 0)
    if lost:
        largest = "2e-08" if lost == 2 else "0.0001"
        assert said[0].startswith(f"{lost} of 5 values are too small for torch.{dtype} and become zero")
        assert said[0].endswith(f"the largest is {largest}")
