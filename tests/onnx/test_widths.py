"""How codes are split over widths: the rows and the wide codes together are all of them, in fewer bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factorpack.onnx.sketch import Sketch
from factorpack.onnx.widths import code_widths, split
from factorpack.quantize.uniform import code_width
from factorpack.record import Encoded
from tests.helpers import seeded


def uneven(rows: int, columns: int) -> torch.Tensor:
    """Codes as a planned layer has them: rows of very different sizes, and tails."""
    spread = torch.logspace(1, -2, rows)[:, None]
    tails = seeded(rows, columns) / seeded(rows, columns, seed=1).abs().clamp_min(0.02)
    return (spread * tails).round().to(torch.int16)


@given(st.integers(-32768, 32767))
def test_the_width_of_a_code_is_that_of_the_size_report(code: int) -> None:
    assert int(code_widths(torch.tensor([code], dtype=torch.int16))) == code_width(code, code)


def test_every_row_is_in_one_group_and_no_code_there_is_wider() -> None:
    codes = uneven(48, 600)
    found = split(codes)
    assert found is not None
    assert torch.cat(list(found.rows.values())).sort().values.tolist() == list(range(48))
    widths = code_widths(codes)
    limits = torch.zeros(48, dtype=torch.int64)
    for width, rows in found.rows.items():
        limits[rows] = width
    assert torch.equal((widths > limits[:, None]).flatten().nonzero().flatten(), found.wide)


def test_even_codes_stay_in_one_width() -> None:
    assert split((3 * seeded(32, 64)).round().clamp(-4, 3).to(torch.int8)) is None


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("shape", [(48, 600), (1, 20001), (3, 4001)])
def test_split_codes_are_exact_and_take_less(shape: tuple[int, int], opset: int) -> None:
    codes = uneven(*shape)
    sketch = Sketch(opset)
    sketch.codes(codes)
    width = code_width(int(codes.min()), int(codes.max()))
    assert sum(len(each.data) for each in sketch.stored) < 0.8 * codes.numel() * width / 8
    pytest.importorskip("onnxruntime")
    from tests.onnx.test_writers import rebuilt

    scale = torch.ones(1, 1, dtype=torch.float16)
    encoded = Encoded("scalar", shape, torch.float32, {"codes": codes, "scale": scale}, {"codes": 16})
    for optimised in (False, True):
        assert torch.equal(rebuilt(encoded, optimised, opset), codes.float())
