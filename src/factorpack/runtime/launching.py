"""Triton kernels launched again and again: what a launch needs is looked up at the first one.

Triton looks at all arguments of every launch to find the kernel that was compiled for their types and sizes. For
a layer these are always the same, but for the type of a tensor and whether it begins at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., None]
Grid = tuple[int, int, int]


def current_stream(device: int) -> int:
    """The stream that torch uses now, as a number."""
    found: int = torch._C._cuda_getCurrentRawStream(device)
    return found


class Prepared:
    """A kernel with all of its arguments but the tensors, which come first."""

    __slots__ = ("_constants", "_grid", "_kernel", "_numbers", "_options", "_runs")

    def __init__(
        self,
        kernel: Any,
        grid: Grid,
        numbers: tuple[int, ...],
        constants: dict[str, object],
        options: dict[str, int],
    ) -> None:
        """Numbers and constants are in the order of the kernel's arguments; options are of the compiler."""
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._constants, self._options = constants, options
        self._runs: dict[tuple[object, ...], Run] = {}

    def launch(self, *tensors: Tensor | None) -> Run | None:
        """Runs on the current device, which is that of the tensors, and on its current stream.

        Returns what launches it again, given a stream and tensors of the same types, on the same device, that
        begin at multiples of 16 bytes where these do. The interpreter compiles nothing, and returns None.
        """
        device = tensors[0].device.index  # type: ignore[union-attr]  # there is always a first
        kinds = (device, *[None if each is None else (each.dtype, each.data_ptr() & 15) for each in tensors])
        run = self._runs.get(kinds)
        if run is not None:
            run(current_stream(device), *tensors)
            return run
        compiled = self._launch_by_triton(*tensors)
        if compiled is None:
            return None
        rest = (*self._numbers, *self._constants.values())
        self._runs[kinds] = run = _bound(compiled, self._grid, rest, self._launch_by_triton)
        return run

    def _launch_by_triton(self, *tensors: Tensor | None) -> Any:
        return self._kernel[self._grid](*tensors, *self._numbers, **self._constants, **self._options)


def _bound(compiled: Any, grid: Grid, rest: tuple[object, ...], by_triton: Callable[..., Any]) -> Run:
    """A launch of a compiled kernel. No hook of triton sees it: to look for one takes as long as a small kernel."""
    start, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = grid

    def run(stream: int, *tensors: Tensor | None) -> None:
        try:
            start(x, y, z, stream, function, metadata, None, None, None, *tensors, *rest)
        except TypeError:  # triton 3.6 takes these arguments; another version may take others
            by_triton(*tensors)

    return run
