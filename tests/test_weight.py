"""What a method is given: values, their layout, and what was prepared for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factorpack.decoding import decode
from factorpack.errors import PlanError, WeightError
from factorpack.weight import Weight
from tests.helpers import assert_same_tensor, seeded


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_rows_are_the_filters_of_a_transposed_convolution(
    groups: int, inputs: int, outputs: int, kernel: int
) -> None:
    """Row o of group g holds the values that make output channel o of that group."""
    values = seeded(groups * inputs, outputs, kernel, kernel)
    rows = Weight(values, groups).rows()
    assert rows.shape == (groups * outputs, inputs * kernel**2)
    grouped = values.reshape(groups, inputs, outputs, -1)
    for group in range(groups):
        for output in range(outputs):
            assert_same_tensor(rows[group * outputs + output], grouped[group, :, output].reshape(-1))
    assert Weight(values, groups).filter_size == inputs * kernel**2


@given(
    st.sampled_from([((5, 7), 0), ((6, 4, 3), 0), ((4, 6, 3, 3), 2), ((3, 1, 2, 2, 2), 3)]),
    st.integers(1, 40),
)
def test_tiles_there_and_back(case: tuple[tuple[int, ...], int], tile: int) -> None:
    weight = Weight(seeded(*case[0]), case[1])
    assert_same_tensor(weight.from_tiles(weight.tiles(tile)), weight.values)


def test_what_is_encoded_has_the_weight_s_shape_type_and_layout() -> None:
    weight = Weight(seeded(4, 6, 3, dtype=torch.bfloat16), 2)
    encoded = weight.encoded("keep", {"values": weight.values})
    assert (encoded.shape, encoded.dtype, encoded.transposed_groups) == ((4, 6, 3), torch.bfloat16, 2)
    assert_same_tensor(decode(encoded), weight.values)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (torch.ones(3, 2, dtype=torch.int64), WeightError, "cannot be compressed, only kept"),
        (torch.ones(0, 2), WeightError, "an empty tensor of shape"),
        (torch.full((2, 2), torch.nan), WeightError, "4 of 4 weights are NaN or infinite"),
        (torch.full((2, 2), 2e36), WeightError, "leave no room for FP32 arithmetic"),
        (torch.tensor(1.0), PlanError, "a single value has no channels"),
    ],
)
def test_values_that_no_code_can_represent(
    values: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Weight(values).rows()


def test_work_is_done_once_and_only_for_this_weight() -> None:
    weight, made = Weight(seeded(3, 4)), []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [weight.prepare("a", make), weight.prepare("a", make), weight.prepare("b", make)] == [1, 1, 2]
    assert replace(weight, inputs=None).prepare("a", make) == 3, "another weight has no part in it"
    weight.forget("b")
    assert [weight.prepare("b", make), weight.prepare("a", make)] == [2, 4]
