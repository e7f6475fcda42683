"""What Python takes of a packed layer's forward: the path of a GPU on a CPU, with kernels that do nothing."""

from __future__ import annotations

import ctypes
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from factorpack.runtime import nvrtc

CALLS, ROUNDS = 20, 2000
"""Short rounds, the fastest of which other programs did not interrupt."""


class _Nothing:
    """A kernel, and what compiling it gives."""

    run = function = packed_metadata = staticmethod(lambda *_: None)

    def __getitem__(self, grid: object) -> Callable[..., _Nothing]:
        return lambda *_, **__: self


class _Driver:
    """The parts of CUDA's driver that a launch meets. They do nothing."""

    def __init__(self) -> None:
        self.cuLaunchKernel = ctypes.CDLL(
            None
        ).isalpha  # a C function: that of 1 is 0, and it ignores what follows
        self.cuLaunchKernel.argtypes = nvrtc.LAUNCH_TYPES

    def cuModuleGetFunction(self, function: Any, *_: object) -> int:
        function._obj.value = 1
        return 0


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    from factorpack.runtime import lane_cuda, launching, multiply_triton

    nothing = _Nothing()
    places = ("multiply", "lane_decode", "packed_weight", "packed_layers")
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch(f"factorpack.runtime.{place}.on_gpu", lambda _: True))
        stack.enter_context(patch("factorpack.runtime.multiply.has_triton", lambda: True))
        stack.enter_context(patch("factorpack.runtime.packed_weight.uses_lanes", lambda _: True))
        stack.enter_context(patch.object(nvrtc, "_driver", _Driver))
        stack.enter_context(patch.object(nvrtc, "load_module", lambda *_: nvrtc.Module(ctypes.c_void_p(), 0)))
        stack.enter_context(patch.object(lane_cuda, "_multiprocessors", lambda _: 132))
        stack.enter_context(patch.object(multiply_triton, "_multiply", nothing))
        stack.enter_context(patch.object(multiply_triton, "add_splits", nothing))
        for user in (launching, lane_cuda):
            stack.enter_context(patch.object(user, "current_stream", lambda _: 0))
        stack.callback(lane_cuda._module.cache_clear)
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)))
        yield


def time_overhead(bits: int, side: int = 512) -> dict[str, Any]:
    """Microseconds of a Linear layer of BF16: entropy-coded and at a fixed width, batch 1, and decoding alone."""
    from benchmarks.studies.resident import normal_codes
    from factorpack.record import Encoded
    from factorpack.runtime.packed_layers import PackedLinear, hold_packed
    from factorpack.runtime.packed_weight import PackedWeight

    codes = torch.from_numpy(normal_codes([side, side], bits)).clamp(-8, 7)
    parts = {"codes": codes, "scale": torch.rand(side, 1).half()}
    encoded = Encoded("scalar", (side, side), torch.bfloat16, parts, {"codes": 4})
    like, inputs = torch.empty(0, dtype=torch.bfloat16), torch.randn(1, side, dtype=torch.bfloat16)
    found: dict[str, Any] = {"bits": bits}
    with _as_on_a_gpu(), torch.inference_mode():
        for form in ("coded", "packed"):
            weight = PackedWeight(encoded, like, form)
            assert bool(weight.lanes) == (form == "coded")
            layer = nn.Linear(side, side, bias=False, dtype=torch.bfloat16)
            hold_packed(layer, PackedLinear, weight)
            found[f"{form}_us"] = _least_us(lambda layer=layer: layer(inputs))
            if form == "coded":
                found["decode_us"] = _least_us(weight)
    dense = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    small = torch.randn(1, 8, dtype=torch.bfloat16)
    with torch.inference_mode():
        found["dense_8x8_us"] = _least_us(lambda: dense(small))
    return found


def _least_us(call: Callable[[], object]) -> float:
    call()
    return 1e6 * min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS
