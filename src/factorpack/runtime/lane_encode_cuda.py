"""Lanes encoded on an NVIDIA GPU: what lane_encode.cu is given, and its launches."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from factorpack.runtime import nvrtc
from factorpack.runtime.lane_encode import FIRST_WORDS, GROUP, EncodedLanes, steps_between, symbol_steps
from factorpack.runtime.lane_models import Models
from factorpack.runtime.launching import current_stream
from factorpack.runtime.multiply import on_device

SOURCE = Path(__file__).with_name("lane_encode.cu")
_COMPILING = threading.Lock()
WARPS = 4
"""Groups of a block, as in lane_encode.cu."""
_POINTERS = (
    *("codes", "symbols", "slots", "row_classes", "column_classes"),
    *("room", "states", "about", "groups", "words", "patches"),
)
_NUMBERS = (
    *("columns", "lanes", "rows", "segment", "groups_across", "group_count", "group_room"),
    *("table_bits", "raw_bits", "symbol_count", "low", "steps", "is_pair", "is_wide"),
)


class Job(ctypes.Structure):
    """The argument of both kernels."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _NUMBERS),
    )


Launch = Callable[[str, int, Job], None]
"""Runs a kernel by its name, in so many blocks."""


def encode(matrix: Tensor, models: Models, segment: int) -> EncodedLanes:
    """What `encode_reference` makes, on the GPU that the matrix is on."""
    with on_device(matrix):
        return encode_with(functools.partial(_launch, matrix.device.index), matrix, models, segment)


def encode_with(launch: Launch, matrix: Tensor, models: Models, segment: int) -> EncodedLanes:
    """`encode`, by kernels that `launch` runs where the matrix is."""
    device, (rows, columns) = matrix.device, matrix.shape
    matrix = matrix.contiguous()
    lanes, segments = columns // (1 + models.is_pair), -(-rows // segment)
    across = -(-lanes // GROUP)
    count, most = segments * across, segment * (models.table_bits + models.raw_bits) // 32 + 1
    symbols = np.stack(symbol_steps(models), 1)
    symbols[models.frequencies.ravel() == 0] = 0
    given = {
        "codes": matrix,
        "symbols": _moved(symbols, device),
        "slots": _moved(models.slots().astype(np.int16), device),
        "row_classes": _moved(models.rows, device),
        "column_classes": _moved(models.columns, device),
        "room": torch.empty(count, GROUP * (most + FIRST_WORDS), dtype=torch.int32, device=device),
        "states": torch.empty(segments * lanes, dtype=torch.int16, device=device),
        "about": torch.empty(count, 3, dtype=torch.int32, device=device),
    }
    job = Job(**{name: tensor.data_ptr() for name, tensor in given.items()})
    job.columns, job.lanes, job.rows, job.segment = columns, lanes, rows, segment
    job.groups_across, job.group_count, job.group_room = across, count, given["room"].shape[1]
    job.table_bits, job.raw_bits, job.low = models.table_bits, models.raw_bits, models.low
    job.symbol_count, job.steps = (
        models.frequencies.shape[1],
        steps_between(models.table_bits, models.raw_bits),
    )
    job.is_pair, job.is_wide = models.is_pair, matrix.dtype.itemsize > 1
    blocks = -(-count // WARPS)
    launch("encode_lanes", blocks, job)
    sizes = given["about"][:, 1:]
    ends = sizes.cumsum(0, dtype=torch.int64)
    groups = torch.cat([(ends - sizes).view(-1), ends[-1]]).int()
    words, patches = (torch.empty(size, dtype=torch.int32, device=device) for size in ends[-1].tolist())
    job.groups, job.words, job.patches = groups.data_ptr(), words.data_ptr(), patches.data_ptr()
    launch("place_lanes", blocks, job)
    return EncodedLanes(words, given["states"], groups, patches)


def _moved(array: np.ndarray[tuple[int, ...], np.dtype[np.integer]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _launch(device: int, name: str, blocks: int, job: Job) -> None:
    _kernel(device, name).launch(blocks, 32 * WARPS, 0, current_stream(device), job)


def _kernel(device: int, name: str) -> nvrtc.Kernel:
    with _COMPILING:  # once, whichever thread is first
        return _module(device).kernel(name)


@functools.cache
def _module(device: int) -> nvrtc.Module:
    return nvrtc.load_module(SOURCE.read_text(encoding="utf-8"), SOURCE.name, {}, device)
