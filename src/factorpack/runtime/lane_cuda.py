"""Lanes on an NVIDIA GPU: what lanes.cu is compiled with, and its launches."""

from __future__ import annotations

import ctypes
import functools
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from factorpack.runtime import nvrtc
from factorpack.runtime.lanes import LaneLayout
from factorpack.runtime.launching import current_stream

SOURCE = Path(__file__).with_name("lanes.cu")
TYPES = {
    torch.float32: "FLOAT",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
    torch.int8: "INT8",
    torch.int16: "INT16",
}
SCALES = {"": "NONE", "one": "ONE", "row": "ROW", "column": "COLUMN"}
WARPS = (8, 4, 2)
"""Groups that a block may have, which share the tables."""
SUMMED = 128
"""Columns of a block that adds up segments."""
RING = 512
"""Words of a warp in shared memory, as in lanes.cu."""
_COUNTS = 256 * 4
"""Bytes with which a warp makes the entries of a model."""
_POINTERS = ("packed", "inputs", "scale", "out")
_PLACES = ("count", "states_at", "groups_at", "table_at", "patches_at", "classes_at")
_NUMBERS = ("columns", "lanes", "rows", "segment", "groups", "table_bits", "raw_bits", "models", "low")


class Job(ctypes.Structure):
    """The argument of the kernel `decode_lanes`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in _PLACES),
        *((name, ctypes.c_int) for name in (*_NUMBERS, "wanted", "four")),
    )


class Sums(ctypes.Structure):
    """The argument of the kernel `add_sums`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "scale", "out")),
        *((name, ctypes.c_int) for name in ("columns", "segments", "scales")),
    )


class LaneDecoder:
    """Decodes one weight, with everything looked up once.

    Codes, or their products with the scale, rounded to `decoded` and then converted. `scaled` is "" for codes, "one"
    for one scale, "row" or "column" for one per row or column of the matrix.
    """

    def __init__(
        self,
        packed: Tensor,
        layout: LaneLayout,
        scale: Tensor | None,
        scaled: str,
        dtype: torch.dtype,
        decoded: torch.dtype,
    ) -> None:
        self._new = partial(torch.empty, layout.count, dtype=dtype, device=packed.device)
        self._start = _Start("DECODE", packed, layout, scale, SCALES[scaled], dtype, decoded)

    def __call__(self) -> Tensor:
        out = self._new()
        self._start(0, out.data_ptr())
        return out


class ColumnDecoder:
    """Decodes some columns of one weight, which has one scale or one per column."""

    def __init__(
        self,
        packed: Tensor,
        layout: LaneLayout,
        scale: Tensor,
        scaled: str,
        dtype: torch.dtype,
        decoded: torch.dtype,
    ) -> None:
        self._rows, self._dtype = layout.rows, dtype
        self._arguments = "GATHER", packed, layout, scale, SCALES[scaled], dtype, decoded
        self._starts: dict[int, _Start] = {}

    def __call__(self, wanted: Tensor) -> Tensor:
        """Numbers of columns, (n,) of int64 -> (n, rows). A wrong number stops the device, as in torch."""
        count = len(wanted)
        out = torch.empty(count, self._rows, dtype=self._dtype, device=wanted.device)
        if count:
            if count not in self._starts:
                self._starts[count] = _Start(*self._arguments, wanted=count)
            self._starts[count](wanted.data_ptr(), out.data_ptr())
        return out


class LaneProduct:
    """Multiplies vectors by one weight, then by one scale or one per column: (rows,) -> (columns,)."""

    def __init__(self, packed: Tensor, layout: LaneLayout, scale: Tensor) -> None:
        self._packed, self._scale, self._layout = packed, scale.float(), layout
        self._device, self._columns = packed.device.index, layout.columns
        self._blocks = -(-layout.columns // SUMMED)
        self._new = partial(
            torch.empty, layout.segments, layout.columns, dtype=torch.float32, device=packed.device
        )
        self._added = Sums(scale=self._scale.data_ptr())
        self._added.columns, self._added.segments, self._added.scales = (
            layout.columns,
            layout.segments,
            len(scale),
        )
        self._starts: dict[torch.dtype, tuple[_Start, nvrtc.Kernel]] = {}

    def __call__(self, inputs: Tensor) -> Tensor:
        """One contiguous vector, of any shape -> the same shape, but for the last dimension."""
        dtype = inputs.dtype
        if dtype not in self._starts:
            start = _Start("MULTIPLY", self._packed, self._layout, None, "NONE", dtype, torch.float32, dtype)
            self._starts[dtype] = start, start.module.kernel("add_sums")
        start, add = self._starts[dtype]
        sums, out = (
            self._new(),
            torch.empty((*inputs.shape[:-1], self._columns), dtype=dtype, device=inputs.device),
        )
        start(inputs.data_ptr(), sums.data_ptr())
        added = Sums.from_buffer_copy(self._added)
        added.sums, added.out = sums.data_ptr(), out.data_ptr()
        add.launch(self._blocks, SUMMED, 0, current_stream(self._device), added)
        return out


class _Start:
    """A launch of the kernel for one weight, with all of its arguments but two."""

    def __init__(
        self,
        task: str,
        packed: Tensor,
        layout: LaneLayout,
        scale: Tensor | None,
        scaled: str,
        out: torch.dtype,
        rounded: torch.dtype,
        inputs: torch.dtype = torch.float32,
        wanted: int = 0,
    ) -> None:
        self._device = packed.device.index
        rows, groups = (1, layout.segments * wanted) if wanted else (layout.segments, layout.groups)
        warps = warps_of(rows, groups, _multiprocessors(self._device))
        self._blocks = rows * -(-groups // warps)
        self._threads = 32 * warps
        macros = macros_of(task, layout, scaled, out, rounded, inputs, warps)
        self.module = _module(self._device, tuple(macros.items()))
        self._kernel = self.module.kernel("decode_lanes")
        self._shared = shared_bytes(task, layout, warps)
        if self._shared > nvrtc.LARGE_SHARED:
            self._kernel.allow_shared(self._shared)
        self._held = packed, None if scale is None else scale.float()  # whose memory the job points to
        self._job = job_of(layout, wanted)
        self._job.packed = packed.data_ptr()
        self._job.scale = None if self._held[1] is None else self._held[1].data_ptr()

    def __call__(self, inputs: int, out: int) -> None:
        """Launches with these pointers, on the current stream of the weight's device, which is the current one."""
        job = Job.from_buffer_copy(self._job)  # one of its own: other threads may launch meanwhile
        job.inputs, job.out = inputs, out
        self._kernel.launch(self._blocks, self._threads, self._shared, current_stream(self._device), job)


def warps_of(rows: int, groups: int, multiprocessors: int) -> int:
    """Groups of a block, for `groups` in each of some rows: those with which the busiest multiprocessor has fewest."""
    if rows * groups <= multiprocessors:
        return 1
    busiest = {warps: -(-rows * -(-groups // warps) // multiprocessors) * warps for warps in WARPS}
    return min(busiest, key=busiest.__getitem__)  # of those alike the first, whose groups share tables most


def macros_of(
    task: str,
    layout: LaneLayout,
    scaled: str,
    out: torch.dtype,
    rounded: torch.dtype,
    inputs: torch.dtype,
    warps: int,
) -> dict[str, object]:
    """What lanes.cu is compiled with; it says what each means."""
    return {
        "TASK": task,
        "PAIR": int(layout.is_pair),
        "CLASSED": int(layout.models > 1),
        "RAW": int(layout.raw_bits > 0),
        "INDIRECT": int(layout.is_indirect),
        "PATCHED": int(layout.has_patches),
        "EVEN": int(layout.count == layout.rows * layout.columns),
        "STEPS": layout.steps,
        "SCALED": scaled,
        "OUT": TYPES[out],
        "ROUNDED": TYPES[rounded] if scaled != "NONE" else "FLOAT",
        "IN": TYPES[inputs],
        "WARPS": warps,
    }


def shared_bytes(task: str, layout: LaneLayout, warps: int) -> int:
    """The rings, and where they begin; the entries, and what these are made with, or later the vector."""
    made = warps * _COUNTS if layout.is_indirect else 0
    vector = 4 * layout.segment if task == "MULTIPLY" else 0
    return 4 * (RING * (warps + 1) + (layout.models << layout.table_bits) + 4) + max(made, vector)


def job_of(layout: LaneLayout, wanted: int) -> Job:
    """A job without its pointers."""
    job = Job(wanted=wanted, four=4)
    for name in (*_PLACES, *_NUMBERS):
        setattr(job, name, int(getattr(layout, name)))
    return job


@functools.cache
def _module(device: int, macros: tuple[tuple[str, object], ...]) -> nvrtc.Module:
    return nvrtc.load_module(SOURCE.read_text(encoding="utf-8"), SOURCE.name, dict(macros), device)


@functools.cache
def _multiprocessors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
