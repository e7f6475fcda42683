"""Labelled images as the options describe them, and the accuracy measured on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from factorpack.tune.accuracy import Accuracy
from factorpack.tune.images import ImageFolder, image_folder, loader

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True)
class ImageData:
    """A folder of images, and how they are read."""

    folder: Path
    batch_size: int
    image_size: int
    workers: int

    def training(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Augmented images of train/, or of the folder itself, shuffled."""
        images = ImageFolder(image_folder(self.folder, "train"), self.image_size, augment=True)
        return loader(images, self.batch_size, self.workers, shuffle=True)

    def validation(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Images of val/, or of the folder itself, in order."""
        images = ImageFolder(image_folder(self.folder, "val"), self.image_size)
        return loader(images, self.batch_size, self.workers)

    @property
    def has_validation(self) -> bool:
        return (self.folder / "val").is_dir()


def accuracy_text(accuracy: Accuracy) -> str:
    return f"top-1 {accuracy.top1:.2%}, top-5 {accuracy.top5:.2%} of {accuracy.samples} images"
