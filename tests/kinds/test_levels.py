"""Codes that select levels."""

from __future__ import annotations

import pytest
import torch

from factorpack.decoding import check, decode, specs
from factorpack.errors import FormatError
from factorpack.record import Encoded
from tests.helpers import assert_same_tensor
from tests.kinds.coded import codes, level_codes


def test_levels_by_hand() -> None:
    """Code 0 is the middle level, or of an even number the first above the middle."""
    three = level_codes([-1, 0, 1], [1, 1, 0], levels=[[-5.0, 0.5, 2.0]], bits=2, shape=(2, 3))
    assert decode(three).tolist() == [[-5.0, 0.5, 2.0], [2.0, 2.0, 0.5]]
    each = level_codes([-1, 0], [0, -1], levels=[[1.0, 2.0], [3.0, 4.0]], bits=1, shape=(2, 1, 2))
    assert decode(each).tolist() == [[[1.0, 2.0]], [[4.0, 3.0]]]
    four = level_codes([-2, -1, 0, 1], levels=[[1.0, 2.0, 3.0, 4.0]], bits=2, shape=(1, 4))
    assert decode(four).tolist() == [[1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize("step", [0.25, 3.0])
def test_evenly_spaced_levels_are_scalar_codes(step: float) -> None:
    wide = codes(5, 7)
    levels = step * torch.arange(-8, 8)[None].float()
    parts = {"codes": wide, "levels": levels}
    scalar_parts = {"codes": wide, "scale": torch.full((1, 1), step)}
    assert_same_tensor(
        decode(Encoded("levels", (5, 7), torch.float32, parts, {"codes": 4})) + 0.0,
        decode(Encoded("scalar", (5, 7), torch.float32, scalar_parts, {"codes": 4})) + 0.0,
    )


@pytest.mark.parametrize(
    ("code", "found"), [(-2, "-2 to 1"), (-4, "-4 to 1"), (2, "-1 to 2"), (3, "-1 to 3")]
)
def test_a_code_without_a_level_is_refused(code: int, found: str) -> None:
    encoded = level_codes([-1, 0, 1], [code, 0, 0], levels=[[1.0, 2.0, 3.0]], bits=3, shape=(2, 3))
    check("levels", encoded.layout, torch.float32, specs(encoded))
    with pytest.raises(FormatError, match=f"codes {found}, 3 levels allow -1 to 1"):
        decode(encoded)
