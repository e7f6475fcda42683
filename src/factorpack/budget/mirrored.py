"""Mirrored copies of calibration images: inputs that nobody has to collect, where left and right mean the same."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from factorpack.batches import evaluating, run
from factorpack.budget.outputs import predictions_of
from factorpack.calibration.calibrate import Calibration, is_image
from factorpack.errors import SourceError
from factorpack.passes.resident import resident_of

FEW = 256
"""With as many inputs copies are not worth their time, unless they are asked for."""
ASKED = 64
"""Images whose mirrored copies are shown to the model."""
LEAST_AGREEMENT = 0.75
"""The share of them that it has to take for the same: ResNet18 does so with 87 %, MobileNetV2 with 91 %."""


def with_mirrored(calibration: Calibration, model: nn.Module, mirror: bool | None) -> Calibration:
    """The inputs, each followed by its mirrored copy; `mirror` None: where there are few and the model agrees.

    Other inputs than batches of images, (n, channels, height, width), stay as they are.
    """
    if mirror is False or not all(is_image(batch) for batch in calibration.batches):
        return calibration
    if mirror is None and (len(calibration) >= FEW or not _looks_the_same(calibration, model)):
        return calibration
    found = copy.copy(calibration)
    # As large as they were: what fitted into memory still does.
    found.batches = [
        _beside_mirrored(part) for batch in calibration.batches for part in batch.split(-(-len(batch) // 2))
    ]
    return found


def _looks_the_same(calibration: Calibration, model: nn.Module) -> bool:
    """Whether a classifier gives most of the first images and of their mirrored copies the same class."""
    if resident_of(model) is not None:
        return False
    agreed, count = 0, 0
    with evaluating(model):
        for batch in calibration.first(ASKED).batches:
            try:
                found = [predictions_of(run(model, each), each) for each in (batch, batch.flip(-1))]
            except SourceError:
                return False
            if not all(each.are_logits for each in found):
                return False
            first, second = (each.values.argmax(1) for each in found)
            agreed, count = agreed + int((first == second).sum()), count + len(first)
    return agreed >= LEAST_AGREEMENT * count


def _beside_mirrored(images: Tensor) -> Tensor:
    """Images, each followed by its mirrored copy, in the memory layout that they have."""
    both = torch.stack([images, images.flip(-1)], 1).flatten(0, 1)
    last = images.is_contiguous(memory_format=torch.channels_last)
    return both.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
