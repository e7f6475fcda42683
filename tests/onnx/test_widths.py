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


def test_rows_are_looked_at_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = uneven(48, 600)
    whole = split(codes)
    monkeypatch.setattr("factorpack.onnx.widths._AT_ONCE", 1500)
    parts = split(codes)
    assert whole is not None
    assert parts is not None
    assert torch.equal(whole.wide, parts.wide)
    assert {width: rows.tolist() for width, rows in whole.rows.items()} == {
        width: rows.tolist() for width, rows in parts.rows.items()
    }


def test_no_distance_is_longer_than_fp32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorpack.onnx.widths.MAX_DISTANCE", 2048)
    codes = torch.zeros(4, 5000, dtype=torch.int16)
    codes[:, ::2] = 1
    codes[0, 3], codes[3, 4990] = 3000, -3000
    found = split(codes)
    assert found is not None
    assert int(found.wide.diff(prepend=torch.zeros(1, dtype=torch.int64)).max()) <= 1024
    assert {3, 3 * 5000 + 4990} < set(found.wide.tolist())
    pytest.importorskip("onnxruntime")
    from tests.onnx.test_writers import rebuilt

    parts = {"codes": codes, "scale": torch.ones(1, 1, dtype=torch.float16)}
    encoded = Encoded("scalar", (4, 5000), torch.float32, parts, {"codes": 16})
    assert torch.equal(rebuilt(encoded, True, 21), codes.float())
