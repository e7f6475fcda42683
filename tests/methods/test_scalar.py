"""Scalar codes: one scale an output channel, wherever the channel lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from factorpack.decoding import decode
from factorpack.errors import PlanError, WeightError
from factorpack.methods import Scalar
from factorpack.quantize.uniform import fit_scale, from_codes, to_codes
from factorpack.weight import Weight
from tests.helpers import assert_same_tensor, seeded


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 3, 3), (6,), (1, 4)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_are_output_channels(shape: tuple[int, ...], bits: int) -> None:
    weight = seeded(*shape)
    encoded = Scalar(bits).encode(Weight(weight))
    rows = weight.reshape(shape[0], -1)
    scale = fit_scale(rows, bits)
    assert_same_tensor(encoded.parts["scale"], scale)
    assert_same_tensor(decode(encoded), from_codes(to_codes(rows, scale, bits), scale).reshape(shape))


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_weights_have_a_scale_an_output_channel(groups: int) -> None:
    """A loud output channel must not coarsen the others."""
    weight = seeded(4, 3, 2, 2)
    weight[:2, 1] *= 1000.0  # output 1 of the first group; of the only group, half of its inputs
    encoded = Scalar(8, clip="minmax").encode(Weight(weight, groups))
    assert encoded.parts["scale"].shape == (3 * groups, 1)
    loud = encoded.parts["scale"].flatten() > 1.0
    assert loud.nonzero().flatten().tolist() == [1]
    assert ((decode(encoded) - weight).abs()[:, [0, 2]] <= encoded.parts["scale"][~loud].max()).all()


def test_a_single_number_has_no_channel() -> None:
    with pytest.raises(PlanError, match="no channels"):
        Scalar().encode(Weight(torch.tensor(1.0)))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.arange(4).reshape(2, 2), "torch.int64 values cannot be compressed, only kept"),
        (torch.empty(2, 0), r"an empty tensor of shape \(2, 0\)"),
        (torch.tensor([[1.0, torch.nan], [torch.inf, 0.0]]), "2 of 4 weights are NaN or infinite"),
        (torch.full((2, 2), 2e36), "leave no room for FP32 arithmetic"),
    ],
)
def test_weights_no_code_can_stand_for(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        Scalar().encode(Weight(weight))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 1}, "bits is 1, allowed are 2 to 8"),
        ({"bits": 9}, "bits is 9, allowed are 2 to 8"),
        ({"bits": True}, "bits is True, a bool; expected int"),
        ({"bits": 4.0}, "bits is 4.0, a float; expected int"),
        ({"clip": "none"}, "clip is 'none', allowed are 'mse' and 'minmax'"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Scalar(**settings)
