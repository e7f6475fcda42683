"""Image folders in ImageNet's layout, one folder per class, with the usual crops."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from factorpack.errors import PlanError, SourceError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_WORKERS, MAX_SIDE = 64, 4096
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
ENDINGS = f"expected files that end in {', '.join(sorted(SUFFIXES))}"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """`folder/class/image.jpg`, classes numbered in alphabetical order.

    Evaluation resizes the short side to 8/7 of `side` and crops the centre (256 and 224, as usual);
    `augment` takes random crops of 8 to 100 % of the area, and flips. Normalized as in torchvision.
    """

    def __init__(self, folder: str | Path, side: int = 224, augment: bool = False) -> None:
        _check("the image size", side, 1, MAX_SIDE)
        self.folder, self.side, self.augment = Path(folder), side, augment
        self.classes = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        self.files = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((self.folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise SourceError(f"{self.folder} holds no class folders with images, {ENDINGS}")

    def part(self, places: Sequence[int], augment: bool = False) -> ImageFolder:
        """Some of the images, under the same class numbers."""
        part = copy.copy(self)
        part.files, part.augment = [self.files[place] for place in places], augment
        return part

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, number = self.files[index]
        image = _open_image(path)
        return _normalize(
            _random_crop(image, self.side) if self.augment else _crop_centre(image, self.side)
        ), number


def unlabelled_batches(folder: Path, samples: int, side: int = 224, batch_size: int = 32) -> Iterator[Tensor]:
    """Batches of up to `samples` images from anywhere below a folder, evenly spaced over all of them."""
    _check("the image size", side, 1, MAX_SIDE)
    _check_folder(folder)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise SourceError(f"{folder} holds no images, {ENDINGS}")
    count = min(samples, len(files))
    chosen = [files[index * len(files) // count] for index in range(count)]
    for start in range(0, count, batch_size):
        yield torch.stack(
            [_normalize(_crop_centre(_open_image(path), side)) for path in chosen[start : start + batch_size]]
        )


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise SourceError(f"there is no folder {folder}")
    if not folder.is_dir():
        raise SourceError(f"{folder} is a file, expected a folder of images")


def image_folder(data: Path, split: str) -> Path:
    """`data/split` if there is such a folder, else `data` itself."""
    _check_folder(data)
    return data / split if (data / split).is_dir() else data


def loader(
    dataset: ImageFolder, batch_size: int, workers: int, shuffle: bool = False
) -> DataLoader[tuple[Tensor, Tensor]]:
    _check("the number of loading processes", workers, 0, MAX_WORKERS)
    if batch_size < 1:
        raise PlanError(f"a batch of {batch_size} images, expected at least one")
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers, "shuffle": shuffle}
    if shuffle and len(dataset) < batch_size:
        raise SourceError(f"{len(dataset)} images do not fill a batch of {batch_size}")
    images: Dataset[Any] = dataset  # the loader collates labels into tensors
    return DataLoader(images, drop_last=shuffle, pin_memory=torch.cuda.is_available(), **options)


def _check(what: str, found: int, least: int, most: int) -> None:
    if not least <= found <= most:
        raise PlanError(f"{what} is {found}, allowed are {least} to {most}")


def _normalize(image: Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def _open_image(path: Path) -> Image:
    try:
        from PIL import Image
    except ImportError as error:
        raise SourceError("reading images needs pillow: pip install 'factorpack[images]'") from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # pillow fails on damaged images in a dozen ways
        raise SourceError(f"{path} cannot be read as an image: {error}") from error


def _crop_centre(image: Image, side: int) -> Image:
    short = round(side * 8 / 7)
    width, height = image.size
    scale = short / min(width, height)
    if min(width, height) != short:
        image = image.resize((max(round(width * scale), side), max(round(height * scale), side)), 2)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _random_crop(image: Image, side: int) -> Image:
    """A crop of random area and aspect ratio, resized to a square and mirrored half of the time."""
    width, height = image.size
    for _ in range(10):
        area = width * height * float(torch.empty(1).uniform_(0.08, 1.0))
        ratio = math.exp(float(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3))))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = int(torch.randint(width - wide + 1, (1,)))
            top = int(torch.randint(height - high + 1, (1,)))
            image = image.resize((side, side), 2, (left, top, left + wide, top + high))
            break
    else:
        image = _crop_centre(image, side)
    if float(torch.rand(1)) < 0.5:
        from PIL.Image import Transpose

        return image.transpose(Transpose.FLIP_LEFT_RIGHT)
    return image
