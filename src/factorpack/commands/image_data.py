"""Labelled images as the options describe them, and the accuracy measured on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from factorpack.tune.accuracy import Accuracy
from factorpack.tune.held_out import PLANNED_INPUTS, even_places, split_places
from factorpack.tune.images import ImageFolder, image_folder, loader

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True, eq=False)
class TrainingImages:
    """What fine-tuning reads: augmented and shuffled to train on, plain to measure on and to plan on."""

    batches: DataLoader[tuple[Tensor, Tensor]]
    held_out: DataLoader[tuple[Tensor, Tensor]] | None
    calibration: DataLoader[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ImageData:
    """A folder of images, and how they are read."""

    folder: Path
    batch_size: int
    image_size: int
    workers: int

    def training(self, held_out_share: float) -> TrainingImages:
        """Images of train/, or of the folder itself, without those that are held out."""
        images = ImageFolder(image_folder(self.folder, "train"), self.image_size)
        rest, held = split_places(len(images), held_out_share, self.batch_size)
        count = min(len(rest), PLANNED_INPUTS)
        some = [rest[place] for place in even_places(len(rest), count)]
        return TrainingImages(
            loader(images.part(rest, augment=True), self.batch_size, self.workers, shuffle=True),
            loader(images.part(held), self.batch_size, self.workers) if held else None,
            loader(images.part(some), self.batch_size, self.workers),
        )

    def validation(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Images of val/, or of the folder itself, in order."""
        images = ImageFolder(image_folder(self.folder, "val"), self.image_size)
        return loader(images, self.batch_size, self.workers)

    @property
    def has_validation(self) -> bool:
        return (self.folder / "val").is_dir()


def accuracy_text(accuracy: Accuracy) -> str:
    return f"top-1 {accuracy.top1:.2%}, top-5 {accuracy.top5:.2%} of {accuracy.samples} images"
