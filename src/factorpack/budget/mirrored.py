"""Mirrored copies of calibration images: inputs that nobody has to collect, where left and right mean the same."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from factorpack.budget.views import in_layout_of, looks_the_same, mirrored
from factorpack.calibration.calibrate import Calibration, is_image

FEW = 256
"""With as many inputs copies are not worth their time, unless they are asked for."""


def with_mirrored(calibration: Calibration, model: nn.Module, mirror: bool | None) -> Calibration:
    """The inputs, each followed by its mirrored copy; `mirror` None: where there are few and the model agrees.

    Other inputs than batches of images, (n, channels, height, width), stay as they are.
    """
    if mirror is False or not all(is_image(batch) for batch in calibration.batches):
        return calibration
    if mirror is None and (len(calibration) >= FEW or not looks_the_same(calibration, model, mirrored)):
        return calibration
    found = copy.copy(calibration)
    # As large as they were: what fitted into memory still does.
    found.batches = [
        _beside_mirrored(part) for batch in calibration.batches for part in batch.split(-(-len(batch) // 2))
    ]
    return found


def _beside_mirrored(images: Tensor) -> Tensor:
    """Images, each followed by its mirrored copy, in the memory layout that they have."""
    return in_layout_of(images, torch.stack([images, mirrored(images)], 1).flatten(0, 1))
