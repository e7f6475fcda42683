"""The plan for a smaller size, from which training starts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from factorpack.compression import compress
from factorpack.packed import Packed


def plan_start(
    packed: Packed, model: nn.Module, teacher: nn.Module | None, inputs: Iterable[Any], max_bytes: int
) -> Packed:
    """What `compress` makes of the original at a size, calibrated on training inputs.

    The original is the teacher where it has the same tensors, else what the given file decodes to.
    """
    if teacher is not None and _is_original(teacher, packed):
        original = teacher
    else:
        original = packed.load_into(copy.deepcopy(model))
    return compress(original, max_bytes=max_bytes, calibration=inputs, progress=False)


def _is_original(teacher: nn.Module, packed: Packed) -> bool:
    shapes = {name: shape for name, (_, shape) in packed.shapes().items()}
    return {name: tuple(value.shape) for name, value in teacher.state_dict().items()} == shapes
