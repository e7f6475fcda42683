"""Modules and launches of CUDA's driver, by a driver that is not there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from factorpack.runtime import nvrtc


class Driver:
    """Does nothing, without a context at first; every call but a launch succeeds."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_context = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuModuleGetFunction":
                arguments[0]._obj.value = 7
            if name == "cuCtxSetCurrent":
                self.has_context = True
            return 0 if self.has_context or name in ("cuInit", "cuDevicePrimaryCtxRetain") else 201

        return call

    @staticmethod
    def cuGetErrorName(_result: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"
        return 0


class Empty(ctypes.Structure):
    pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: made)
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: b"code")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return made


def test_a_module_is_loaded_and_a_kernel_launched_in_threads_without_a_context(driver: Driver) -> None:
    kernel = nvrtc.load_module("", "nothing.cu", {}, 0).kernel("nothing")
    assert driver.calls.index("cuCtxSetCurrent") < driver.calls.index("cuModuleLoadData")
    driver.calls.clear()
    kernel.launch(1, 32, 0, 0, Empty())
    assert driver.calls == ["cuLaunchKernel"]
    driver.has_context = False  # as in a thread that torch has not used
    driver.calls.clear()
    kernel.launch(1, 32, 0, 0, Empty())
    assert driver.calls[0] == driver.calls[-1] == "cuLaunchKernel"
    assert "cuCtxSetCurrent" in driver.calls


def test_errors_of_the_driver_are_named(driver: Driver) -> None:
    kernel = nvrtc.Kernel(7, 0)
    driver.has_context = False
    with pytest.raises(nvrtc.CudaError, match="CUDA_ERROR_INVALID_CONTEXT"):
        kernel.allow_shared(1 << 16)


def test_the_compiler_is_given_what_a_source_is_compiled_with(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr(nvrtc, "compile_source", lambda _source, _name, options: given.extend(options) or b"")
    nvrtc.load_module("", "nothing.cu", {"STEPS": 3}, 0)
    assert given == ["--gpu-architecture=sm_90", "--std=c++17", "-DSTEPS=3"]
    assert driver.calls
