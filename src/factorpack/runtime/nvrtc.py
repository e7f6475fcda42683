"""Kernels in CUDA C: compiled by NVRTC, which comes with torch, and launched on torch's streams."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

LARGE_SHARED = 48 << 10
"""Bytes of shared memory that a kernel may have without being allowed more."""
_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_NO_CONTEXT = (3, 201)
"""CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT"""
LAUNCH_TYPES: list[Any] = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
"""Function, grid, block, shared bytes, stream, arguments, nothing."""


class CudaError(RuntimeError):
    """What the compiler or the driver says."""


class Kernel:
    """A function of a module on one device. It takes one argument, a structure."""

    __slots__ = ("_device", "_function", "_launch")

    def __init__(self, function: int, device: int) -> None:
        self._function, self._device, self._launch = function, device, _driver().cuLaunchKernel

    def launch(self, blocks: int, threads: int, shared_bytes: int, stream: int, argument: Any) -> None:
        pointer = ctypes.c_void_p(ctypes.addressof(argument))
        numbers = blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointer), None
        found = self._launch(self._function, *numbers)
        if found in _NO_CONTEXT:
            _enter_context(self._device)
            found = self._launch(self._function, *numbers)
        if found:
            _check(found)

    def allow_shared(self, shared_bytes: int) -> None:
        """Must be called once for more than LARGE_SHARED."""
        _check(_driver().cuFuncSetAttribute(ctypes.c_void_p(self._function), _DYNAMIC_SHARED, shared_bytes))


def load_module(source: str, name: str, macros: Mapping[str, object], device: int) -> Module:
    """Compiles a source for a device."""
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    options += [f"-D{macro}={value}" for macro, value in macros.items()]
    binary, module = compile_source(source, name, options), ctypes.c_void_p()
    with torch.cuda.device(device):
        _enter_context(device)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), binary))
    return Module(module, device)


class Module:
    """What a source was compiled to. It stays loaded while the process lives."""

    def __init__(self, module: ctypes.c_void_p, device: int) -> None:
        self._module, self._device = module, device

    def kernel(self, name: str) -> Kernel:
        function = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
        assert function.value is not None
        return Kernel(function.value, self._device)


def compile_source(source: str, name: str, options: list[str]) -> bytes:
    """The machine code; CudaError with the compiler's messages where there are any errors."""
    library, program = _library(), ctypes.c_void_p()
    text, file = source.encode(), name.encode()
    created = library.nvrtcCreateProgram(ctypes.byref(program), text, file, 0, None, None)
    if created:
        raise CudaError(f"NVRTC failed to read {name}: error {created}")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _text_of(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise CudaError(f"NVRTC failed to compile {name}: {log.rstrip(bytes(1)).decode()}")
        return _text_of(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text_of(size_of: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    get(program, text)
    return text.raw


@functools.cache
def why_not(device: int | None) -> str:
    """Why kernels cannot be compiled for a GPU of CUDA; empty where one has been, and is loaded."""
    if torch.version.cuda is None or device is None:
        return "torch was built without CUDA"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"that needs a GPU of compute capability 8.0, this one has {major}.{minor}"
    try:
        load_module('extern "C" __global__ void nothing() {}', "nothing.cu", {}, device).kernel("nothing")
    except (OSError, CudaError) as error:
        return f"no kernel could be compiled ({error})"
    return ""


@functools.cache
def _library() -> Any:
    failed: OSError | None = None
    for name in _library_names():
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failed = failed or error
    raise failed or OSError("it was not found")


def _library_names() -> Iterator[str]:
    """Of torch's own version of CUDA: already loaded or installed, or in the packages beside torch."""
    major = str(torch.version.cuda).split(".")[0]
    if sys.platform == "win32":
        yield f"nvrtc64_{major}0_0.dll"
        return
    yield f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).parents[1] / "nvidia"
    yield from map(str, sorted(packages.glob(f"*/lib/libnvrtc.so.{major}")))


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuLaunchKernel.argtypes = LAUNCH_TYPES
    return library


def _enter_context(device: int) -> None:
    """The context that torch uses. A new thread has none until CUDA's runtime, which torch calls, needs one there."""
    context = ctypes.c_void_p()
    _check(_driver().cuInit(0))
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(_driver().cuCtxSetCurrent(context))


def _check(result: int) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        raise CudaError((name.value or b"unknown error of CUDA").decode())
