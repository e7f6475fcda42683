"""The plan for a smaller size, from which training starts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from factorpack.budget.planner import Planner
from factorpack.compression import compress
from factorpack.packed import Packed
from factorpack.tune.held_out import PLANNED_INPUTS


def plan_start(
    packed: Packed, model: nn.Module, teacher: nn.Module | None, inputs: Iterable[Any], max_bytes: int
) -> Packed:
    """What `compress` makes of the original at a size, calibrated on up to 1,000 training inputs.

    The original is the teacher where it has the same tensors, else what the given file decodes to.
    """
    if teacher is not None and _is_original(teacher, packed):
        original = teacher
    else:
        original = packed.load_into(copy.deepcopy(model))
    planner = Planner(samples=PLANNED_INPUTS)
    return compress(original, max_bytes=max_bytes, calibration=inputs, planner=planner, progress=False)


def _is_original(teacher: nn.Module, packed: Packed) -> bool:
    shapes = {name: shape for name, (_, shape) in packed.shapes().items()}
    return {name: tuple(value.shape) for name, value in teacher.state_dict().items()} == shapes
