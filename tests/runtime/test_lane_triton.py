"""The GPU's kernel for codes in lanes, against the codes: on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import inspect
import os

import numpy as np
import pytest
import torch

from factorpack.runtime import lane_models, lanes
from factorpack.runtime.lanes import pack_lanes
from tests.helpers import seeded
from tests.runtime import triton_interpreter
from tests.runtime.test_lanes import CASES, normal

pytest.importorskip("triton", reason="the kernel needs triton, which comes with CUDA builds of torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)


@pytest.fixture(autouse=True)
def whole_language(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        triton_interpreter.complete(monkeypatch)


@pytest.mark.parametrize("large", [0, 1 << 22])
@pytest.mark.parametrize("case", CASES)
def test_codes_are_decoded(case: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from factorpack.runtime.lane_triton import decode_lanes

    monkeypatch.setattr(lane_models, "LARGE", large)
    if case == "pairs":
        monkeypatch.setattr(lanes, "PAIR_MARGIN", 9.0)
    codes = CASES[case]
    packed, layout = pack_lanes(codes, codes.shape[1])
    for _ in range(2):  # the second time without looking for the kernel
        out = torch.full((layout.count,), -77, dtype=torch.int16, device=DEVICE)
        decode_lanes(packed.to(DEVICE), layout, None, "", out, torch.int16)
        assert np.array_equal(out.cpu().numpy(), codes.reshape(-1))


@pytest.mark.parametrize("scale", [0.1, 0.5, 100.0])
def test_tails_of_any_length(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from factorpack.runtime.lane_triton import decode_lanes

    monkeypatch.setattr(lanes, "LANE_BITS", {0: 20000})
    codes = normal(2000, 128, scale)
    codes[:, ::2] = 0
    packed, layout = pack_lanes(codes, 128, free=False)
    out = torch.full((layout.count,), -77, dtype=torch.int16, device=DEVICE)
    decode_lanes(packed.to(DEVICE), layout, None, "", out, torch.int16)
    assert np.array_equal(out.cpu().numpy(), codes.reshape(-1))


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("scaled", ["one", "row", "column"])
def test_weights_are_those_of_float32_products(
    scaled: str, pair: bool, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from factorpack.runtime import lane_triton
    from factorpack.runtime.lane_triton import decode_lanes

    monkeypatch.setattr(lane_triton, "CHOSEN", lane_triton.Variant(adds=adds))
    monkeypatch.setattr(lanes, "PAIR_MARGIN", 9.0 if pair else 0.0)
    codes = normal(90, 300, 1.0).astype(np.int8)
    codes[5, 7], codes[89, 299] = 100, -90
    packed, layout = pack_lanes(codes, 300, free=False)
    assert (layout.is_pair, layout.has_patches) == (pair, True)
    scale = seeded(*{"one": (1, 1), "row": (90, 1), "column": (1, 300)}[scaled]).abs().half()
    expected = torch.from_numpy(codes).float() * scale.float()
    for dtype in (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.bfloat16):
        out = torch.full((layout.count,), torch.nan, dtype=dtype, device=DEVICE)
        decode_lanes(packed.to(DEVICE), layout, scale.to(DEVICE), scaled, out, torch.float32)
        assert torch.equal(out.cpu().view(90, 300), expected.to(dtype))


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("scales", [1, 300])
def test_a_vector_is_multiplied(scales: int, pair: bool, adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from factorpack.runtime import lane_triton
    from factorpack.runtime.lane_triton import multiply_lanes

    monkeypatch.setattr(lane_triton, "CHOSEN", lane_triton.Variant(adds=adds))
    monkeypatch.setattr(lanes, "PAIR_MARGIN", 9.0 if pair else 0.0)
    monkeypatch.setattr(lanes, "LANE_BITS", {0: 60})
    codes = normal(90, 300, 1.0).astype(np.int8)
    codes[5, 7], codes[89, 299] = 100, -90
    packed, layout = pack_lanes(codes, 300, free=False)
    assert layout.segments > 1
    assert layout.has_patches
    inputs, scale = seeded(1, 90), seeded(scales, seed=3).abs().half()
    found = multiply_lanes(inputs.to(DEVICE), packed.to(DEVICE), layout, scale.to(DEVICE)).cpu()
    expected = inputs.double() @ torch.from_numpy(codes).double() * scale.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_arguments_are_in_the_order_of_the_kernel() -> None:
    """A compiled kernel takes them by their places."""
    from factorpack.runtime import lane_triton

    _, layout = pack_lanes(normal(90, 300, 1.0), 300)
    names = list(inspect.signature(lane_triton._decode.fn).parameters)
    constants = lane_triton._constants(layout, True, "", torch.float32)
    assert names[-len(constants) :] == list(constants)
    assert len(names) == 4 + len(lane_triton._numbers(layout)) + len(constants)
