"""The GPU's kernel for codes in lanes, against the codes: on a GPU, or compiled for a CPU (lanes_on_cpu.cpp)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from factorpack.runtime import lane_cuda, lane_models, lanes
from factorpack.runtime.lane_cuda import Sums, job_of, macros_of, shared_bytes
from factorpack.runtime.lanes import LaneLayout, pack_lanes
from tests.helpers import seeded
from tests.runtime.test_lanes import CASES, normal

HAS_GPU = torch.cuda.is_available()
HOST = Path(__file__).with_name("lanes_on_cpu.cpp")
if not HAS_GPU and shutil.which("g++") is None:
    pytest.skip("there is no GPU and no g++", allow_module_level=True)


def packed_as(
    codes: np.ndarray, large: int = 1 << 22, pair: float = 0.0, bits: int = 0
) -> tuple[Tensor, LaneLayout]:
    """Codes in lanes: of matrices as large as these or not, in pairs or not, in lanes of some length or the usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_models, "LARGE", large)
        patch.setattr(lanes, "PAIR_MARGIN", {0: pair})
        if bits:
            patch.setattr(lanes, "LANE_BITS", {0: bits})
        return pack_lanes(torch.from_numpy(codes), codes.shape[1], free=not bits)


@dataclass(frozen=True)
class Call:
    """One launch, and what it must give."""

    task: str
    packed: Tensor
    layout: LaneLayout
    expected: Tensor
    scale: Tensor | None = None
    scaled: str = ""
    inputs: Tensor | None = None
    rounded: torch.dtype = torch.float32
    warps: int = 2
    macros: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        is_product = self.task == "MULTIPLY"
        dtype = torch.float32 if self.inputs is None or not is_product else self.inputs.dtype
        scaled = "NONE" if is_product else lane_cuda.SCALES[self.scaled]
        found = macros_of(
            self.task, self.layout, scaled, self.expected.dtype, self.rounded, dtype, self.warps
        )
        object.__setattr__(self, "macros", found)

    def check(self, found: Tensor) -> None:
        if self.task == "MULTIPLY":
            # FP32 sums, then one rounding.
            wide = torch.float64 if found.dtype == torch.float32 else found.dtype
            torch.testing.assert_close(found.to(wide), self.expected.to(wide), rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found.view(-1), self.expected.view(-1))


def decoded() -> Iterator[tuple[str, Call]]:
    for name, codes in CASES.items():
        for large in (0, 1 << 22):
            packed, layout = packed_as(codes, large, 9.0 if name == "pairs" else 0.0)
            yield f"{name}, {large}", Call("DECODE", packed, layout, torch.from_numpy(codes.astype(np.int16)))
    wide = normal(2000, 128, 0.5)
    wide[:, ::2] = 0
    packed, layout = packed_as(wide, bits=20000)
    yield "lanes of different lengths", Call("DECODE", packed, layout, torch.from_numpy(wide))
    uneven = normal(211, 331, 1.0).astype(np.int8)
    packed, layout = packed_as(uneven, pair=9.0, bits=300)
    yield "a last group of few lanes", Call("DECODE", packed, layout, torch.from_numpy(uneven))
    flat = normal(1, 70_001, 1.0).astype(np.int8)
    packed, layout = packed_as(flat, pair=9.0)
    yield "a last row of few codes", Call("DECODE", packed, layout, torch.from_numpy(flat))


def with_rare(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
    codes = normal(rows, columns, scale).astype(np.int8)
    codes[5, 7], codes[rows - 1, columns - 1] = 100, -90
    return codes


def scaled() -> Iterator[tuple[str, Call]]:
    codes = with_rare(90, 300)
    shapes = {"one": (1, 1), "row": (90, 1), "column": (1, 300)}
    for how, pair in (("one", 9.0), ("row", 9.0), ("column", 9.0), ("row", 0.0), ("column", 0.0)):
        packed, layout = packed_as(codes, pair=pair, bits=60)
        assert layout.is_pair == (pair > 0)
        scale = seeded(*shapes[how]).abs().half()
        weight = torch.from_numpy(codes).float() * scale.float()
        for dtype, rounded in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.bfloat16),
        ):
            expected = weight.to(rounded).to(dtype)
            name = f"{how}, {dtype}, {'pairs' if pair else 'single'}"
            yield name, Call("DECODE", packed, layout, expected, scale, how, None, rounded)


def multiplied() -> Iterator[tuple[str, Call]]:
    wide = normal(300, 90, 30.0, spread=6.0)
    kinds = {
        "pairs": packed_as(with_rare(90, 300), pair=9.0, bits=60),
        "single": packed_as(with_rare(90, 300), bits=60),
        "wide": packed_as(with_rare(90, 300, 6.0), large=0, bits=60),
        "classes": packed_as(wide, bits=500),
    }
    codes = {"classes": wide, "wide": with_rare(90, 300, 6.0)}
    for (name, (packed, layout)), dtype in zip(
        [*kinds.items(), *kinds.items()],
        [torch.bfloat16] * 4 + [torch.float16, torch.float32] * 2,
        strict=True,
    ):
        own = codes.get(name, with_rare(90, 300))
        assert layout.segments > 1
        for scales in (1, own.shape[1]):
            inputs, scale = seeded(len(own)).to(dtype), seeded(scales, seed=3).abs().half()
            expected = (inputs.double() @ torch.from_numpy(own).double() * scale.double()).to(dtype)
            yield f"{name}, {dtype}, {scales}", Call("MULTIPLY", packed, layout, expected, scale, "", inputs)


def gathered() -> Iterator[tuple[str, Call]]:
    codes = with_rare(90, 300)
    wanted = torch.tensor([7, 0, 299, 31, 32, 64, 7])
    for pair in (0.0, 9.0):
        packed, layout = packed_as(codes, pair=pair, bits=60)
        for how, shape in (("one", (1, 1)), ("column", (1, 300))):
            scale = seeded(*shape).abs().half()
            weight = (torch.from_numpy(codes).float() * scale.float()).bfloat16()
            yield (
                f"{how}, {'pairs' if pair else 'single'}",
                Call("GATHER", packed, layout, weight.T[wanted], scale, how, wanted),
            )


CALLS = {
    f"{kind.__name__}: {name}": call
    for kind in (decoded, scaled, multiplied, gathered)
    for name, call in kind()
}


WRAPPERS = """
static bool launch(void (*)(const void *), const void *, int, int, int);
static void call_decode_NAME(const void *job) { NAME::decode_NAME(*(const NAME::Job *)job); }
static void call_add_NAME(const void *job) { NAME::add_sums_NAME(*(const NAME::Sums *)job); }
extern "C" bool run_NAME(const void *job, int blocks, int threads, int shared) {
    return launch(call_decode_NAME, job, blocks, threads, shared);
}
extern "C" bool add_NAME(const void *job, int blocks, int threads) {
    return launch(call_add_NAME, job, blocks, threads, 0);
}
"""


class OnCpu:
    """lanes.cu compiled for a CPU, in as many variants as the calls need."""

    def __init__(self, folder: Path) -> None:
        variants = dict.fromkeys(tuple(call.macros.items()) for call in CALLS.values())
        self._names = {macros: f"v{number}" for number, macros in enumerate(variants)}
        header = folder / "variants.h"
        header.write_text("".join(self._included(macros, name) for macros, name in self._names.items()))
        library = folder / "lanes.so"
        subprocess.run(
            [
                "g++",
                "-std=c++17",
                "-O1",
                "-w",
                "-shared",
                "-fPIC",
                f'-DVARIANTS="{header}"',
                str(HOST),
                "-o",
                str(library),
            ],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))

    @staticmethod
    def _included(macros: tuple[tuple[str, object], ...], name: str) -> str:
        own = {**dict(macros), "DECODE_LANES": f"decode_{name}", "ADD_SUMS": f"add_sums_{name}"}
        defines = "".join(f"#undef {macro}\n#define {macro} {value}\n" for macro, value in own.items())
        included = f'{defines}namespace {name} {{\n#include "{lane_cuda.SOURCE}"\n}}\n'
        return included + WRAPPERS.replace("NAME", name)

    def run(self, call: Call) -> Tensor:
        name, layout = self._names[tuple(call.macros.items())], call.layout
        wanted = len(call.inputs) if call.task == "GATHER" and call.inputs is not None else 0
        job = job_of(layout, wanted)
        scale = None if call.scale is None else call.scale.float()
        shape = (layout.segments, layout.columns) if call.task == "MULTIPLY" else call.expected.shape
        out = torch.full(shape, 77, dtype=torch.float32 if call.task == "MULTIPLY" else call.expected.dtype)
        job.packed, job.out = call.packed.data_ptr(), out.data_ptr()
        job.scale = None if scale is None else scale.data_ptr()
        job.inputs = None if call.inputs is None else call.inputs.data_ptr()
        across = -(-layout.groups // call.warps)
        blocks = -(-layout.segments * wanted // call.warps) if wanted else layout.segments * across
        shared = shared_bytes(call.task, layout, call.warps)
        assert not getattr(self._library, f"run_{name}")(ctypes.byref(job), blocks, 32 * call.warps, shared)
        if call.task != "MULTIPLY":
            return out
        assert scale is not None
        product = torch.full_like(call.expected, 77)
        sums = Sums(
            out.data_ptr(), scale.data_ptr(), product.data_ptr(), layout.columns, layout.segments, len(scale)
        )
        getattr(self._library, f"add_{name}")(ctypes.byref(sums), -(-layout.columns // 64), 64)
        return product


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    return OnCpu(tmp_path_factory.mktemp("lanes"))


def on_gpu(call: Call) -> Tensor:
    packed, layout = call.packed.cuda(), call.layout
    scale = None if call.scale is None else call.scale.cuda()
    dtype = call.expected.dtype
    if call.task == "DECODE":
        return lane_cuda.LaneDecoder(packed, layout, scale, call.scaled, dtype, call.rounded)()
    assert scale is not None
    assert call.inputs is not None
    if call.task == "GATHER":
        decoder = lane_cuda.ColumnDecoder(packed, layout, scale, call.scaled, dtype, call.rounded)
        return decoder(call.inputs.cuda())
    return lane_cuda.LaneProduct(packed, layout, scale.view(-1))(call.inputs.cuda())


if HAS_GPU:

    @pytest.mark.parametrize("name", CALLS)
    def test_the_kernel_computes_what_the_codes_give(name: str) -> None:
        for _ in range(2):
            CALLS[name].check(on_gpu(CALLS[name]).cpu())

else:

    @pytest.mark.parametrize("name", CALLS)
    def test_the_kernel_computes_what_the_codes_give_on_a_cpu(name: str, on_cpu: OnCpu) -> None:
        CALLS[name].check(on_cpu.run(CALLS[name]))
