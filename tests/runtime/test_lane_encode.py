"""The GPU's kernel that encodes lanes: the same bytes as the reference, on a GPU or compiled for a CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from factorpack.runtime import lane_encode_cuda, lane_models, lanes
from factorpack.runtime.lane_decode import decode_reference
from factorpack.runtime.lane_encode import EncodedLanes
from factorpack.runtime.lane_encode_cuda import SOURCE, WARPS, Job, encode_with
from factorpack.runtime.lane_models import Models
from factorpack.runtime.lanes import LaneLayout, pack_lanes
from tests.runtime.test_lanes import CASES, normal

HAS_GPU = torch.cuda.is_available()
HOST = Path(__file__).with_name("lanes_on_cpu.cpp")
if not HAS_GPU and shutil.which("g++") is None:
    pytest.skip("there is no GPU and no g++", allow_module_level=True)

INCLUDED = """
static bool launch(void (*)(const void *), const void *, int, int, int);
namespace encoder {{
#include "{source}"
static void call_encode_lanes(const void *job) {{ encode_lanes(*(const Job *)job); }}
static void call_place_lanes(const void *job) {{ place_lanes(*(const Job *)job); }}
}}
extern "C" bool run_encode_lanes(const void *job, int blocks, int threads) {{
    return launch(encoder::call_encode_lanes, job, blocks, threads, 0);
}}
extern "C" bool run_place_lanes(const void *job, int blocks, int threads) {{
    return launch(encoder::call_place_lanes, job, blocks, threads, 0);
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | None:
    """lane_encode.cu compiled for a CPU, where there is no GPU."""
    if HAS_GPU:
        return None
    folder = tmp_path_factory.mktemp("lane_encode")
    header, made = folder / "variants.h", folder / "encode.so"
    header.write_text(INCLUDED.format(source=SOURCE))
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f'-DVARIANTS="{header}"']
    subprocess.run(["g++", *options, str(HOST), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


def by_kernel(
    library: ctypes.CDLL | None, codes: Tensor, columns: int, free: bool
) -> tuple[Tensor, LaneLayout]:
    """`pack_lanes` as on a GPU."""
    if library is None:
        packed, layout = pack_lanes(codes.cuda(), columns, free=free)
        return packed.cpu(), layout

    def launch(name: str, blocks: int, job: Job) -> None:
        assert not getattr(library, f"run_{name}")(ctypes.byref(job), blocks, 32 * WARPS)

    def encode(matrix: Tensor, models: Models, segment: int) -> EncodedLanes:
        return encode_with(launch, matrix, models, segment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "_encode", encode)
        return pack_lanes(codes, columns, free=free)


def check(library: ctypes.CDLL | None, codes: np.ndarray, columns: int, free: bool = True) -> LaneLayout:
    own = torch.from_numpy(codes)
    expected, layout = pack_lanes(own, columns, free=free)
    found, its = by_kernel(library, own, columns, free)
    assert its == layout, astuple(its)
    assert torch.equal(found, expected)
    assert torch.equal(decode_reference(found, its, own.dtype), own.reshape(-1))
    return layout


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 150),
    st.sampled_from([0.0, 0.3, 1.0, 6.0, 90.0, 400.0]),
    st.sampled_from([40, 300, 3000]),
    st.sampled_from([0.0, 9.0]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_kernel_makes_the_bytes_of_the_reference(
    library: ctypes.CDLL | None,
    rows: int,
    columns: int,
    scale: float,
    bits: int,
    pair: float,
    narrow: bool,
    seed: int,
) -> None:
    codes = normal(rows, columns, scale, seed=seed).clip(-2048, 2047)
    if narrow:
        codes = codes.clip(-128, 127).astype(np.int8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "PAIR_MARGIN", {0: pair})
        patch.setattr(lanes, "LANE_BITS", {0: bits})
        check(library, codes, columns, free=bool(seed % 2))


@pytest.mark.parametrize("large", [0, 1 << 22])
@pytest.mark.parametrize("case", CASES)
def test_every_way_of_coding_is_the_references(
    case: str, large: int, library: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_models, "LARGE", large)
    if case == "pairs":
        monkeypatch.setattr(lanes, "PAIR_MARGIN", {0: 9.0})
    layout = check(library, CASES[case], CASES[case].shape[1])
    assert layout.is_pair or case != "pairs"
    assert layout.models > 1 or case != "classes"
    assert layout.has_patches or case != "patches"


@pytest.mark.parametrize("pair", [0.0, 9.0])
def test_lanes_without_words_beside_long_ones_and_rare_codes(
    pair: float, library: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LANE_BITS", {0: 9000})
    monkeypatch.setattr(lanes, "PAIR_MARGIN", {0: pair})
    for scale in (0.02, 0.5, 3.0):
        codes = normal(1500, 96, scale)
        codes[:, :48:2] = 0
        codes[1000:, 60:] = 0
        codes[::97, ::31] = 900
        layout = check(library, codes, 96, free=False)
        assert layout.has_patches
        assert layout.is_pair == (pair > 0)


def test_a_kernel_that_is_told_of_other_steps_makes_other_bytes(library: ctypes.CDLL | None) -> None:
    """So the order in which words are taken is part of what the tests above compare."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_encode_cuda, "steps_between", lambda *_: 1)
        with pytest.raises(AssertionError):
            check(library, normal(300, 64, 1.0), 64)
