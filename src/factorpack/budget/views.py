"""Mirrored and shifted views of calibration images, for a layer that sees only one vector per image."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from factorpack.batches import evaluating, run
from factorpack.budget.outputs import predictions_of
from factorpack.calibration.calibrate import Calibration, input_of, is_image
from factorpack.errors import SourceError
from factorpack.passes.resident import resident_of
from factorpack.record import LayerMoments
from factorpack.solve.layer_problem import ENOUGH
from factorpack.solve.moments import MomentAccumulator

View = Callable[[Tensor], Tensor]
ASKED = 64
"""Images whose views are shown to the model."""
LEAST_AGREEMENT = 0.75
"""The share of them that it has to take for the same: mirrored, ResNet18 does so with 87 %, MobileNetV2 with 91 %."""
SHIFT = 16
"""Images are shifted by this part of their sides."""
LEAST_SHARE = 0.1
"""What a layer has to hold of all weights to be worth the passes that views of its own take."""


def mirrored(images: Tensor) -> Tensor:
    return images.flip(-1)


def shifted(images: Tensor, down: int, right: int) -> Tensor:
    """Images moved by a part of their sides, up and left where it is negative; borders are reflected."""
    height, width = images.shape[-2:]
    by = [down * (height // SHIFT), right * (width // SHIFT)]
    room = [max(by[1], 0), max(-by[1], 0), max(by[0], 0), max(-by[0], 0)]
    padded = functional.pad(images, room, mode="reflect")
    return padded[..., room[3] : room[3] + height, room[1] : room[1] + width]


def shifted_down(images: Tensor) -> Tensor:
    return shifted(images, 1, -1)


def shifted_up_and_mirrored(images: Tensor) -> Tensor:
    return mirrored(shifted(images, -1, 1))


def looks_the_same(calibration: Calibration, model: nn.Module, view: View) -> bool:
    """Whether a classifier gives most of the first images and of their views the same class."""
    if resident_of(model) is not None:
        return False
    agreed, count = 0, 0
    with evaluating(model):
        for batch in calibration.first(ASKED).batches:
            try:
                found = [predictions_of(run(model, each), each) for each in (batch, view(batch))]
            except SourceError:
                return False
            if not all(each.are_logits for each in found):
                return False
            first, second = (each.values.argmax(1) for each in found)
            agreed, count = agreed + int((first == second).sum()), count + len(first)
    return agreed >= LEAST_AGREEMENT * count


def views_of(
    calibration: Calibration, model: nn.Module, layers: Collection[str], sizes: Collection[int]
) -> dict[str, tuple[View, ...]]:
    """What Linear layers may be shown beside the images, for those that are worth it; `sizes` are of all weights."""
    worth = LEAST_SHARE * sum(sizes)
    modules = {name: model.get_submodule(name) for name in layers}
    large = [
        name for name, each in modules.items() if isinstance(each, nn.Linear) and each.weight.numel() >= worth
    ]
    if not large or not all(is_image(each) and min(each.shape[-2:]) >= SHIFT for each in calibration.batches):
        return {}
    views = (shifted_down, shifted_up_and_mirrored)
    return (
        dict.fromkeys(large, views) if all(looks_the_same(calibration, model, view) for view in views) else {}
    )


def sees_few(moments: LayerMoments, calibration: Calibration) -> bool:
    """Whether a layer has seen one vector per image, and few of them for the number of its inputs."""
    return moments.positions == len(calibration) < ENOUGH * moments.second.shape[-1]


def moments_of_views(
    views: Sequence[View],
    calibration: Calibration,
    name: str,
    original: nn.Module,
    compressed: nn.Module | None,
) -> LayerMoments:
    """Moments of a layer's inputs on views of the images; `compressed` as in `Calibration.moments`."""
    running = MomentAccumulator(original.get_submodule(name), len(calibration))
    for batch in calibration.batches:
        for view in views:
            images = in_layout_of(batch, view(batch))
            seen = input_of(original, name, images)
            mine = seen if compressed is None else input_of(compressed, name, images)
            running.add(mine, None if compressed is None else seen)
    return running.result()


def in_layout_of(batch: Tensor, images: Tensor) -> Tensor:
    """Images in the memory layout of a batch."""
    last = batch.is_contiguous(memory_format=torch.channels_last)
    return images.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
