"""Small models and data that several tests of fine-tuning share; `build` is what the commands are given."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import factorpack as fp
from factorpack.format.checked_file import read_checked
from tests.helpers import seeded

CLASSES = 3
METHOD = fp.QSPCA(6, 4, 0.1, tile=16)


def with_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same weights on every run, without drawing from torch's own generator."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            fan_in = max(parameter[0].numel(), 1)
            parameter.copy_(seeded(*parameter.shape, seed=seed + index) / fan_in**0.5)
    return model


class SmallNet(nn.Module):
    """A classifier of images of any size."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 16, 3)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, CLASSES)
        with_weights(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(self.norm(self.stem(images)).relu()).relu()
        return self.head(self.drop(x.mean((2, 3))))  # type: ignore[no-any-return]


def build() -> SmallNet:
    return SmallNet()


WORDS = "not a model"


def write_images(folder: Path, count: int) -> None:
    """Three classes of one colour each, every image a little darker than the last."""
    for number, name in enumerate(("ant", "bee", "cat")):
        (folder / name).mkdir(parents=True)
        for shade in range(count):
            colour = [60, 60, 60]
            colour[number] = 250 - 10 * shade
            Image.new("RGB", (20, 17), tuple(colour)).save(folder / name / f"{shade}.png")


def perceptron(norm: bool = False, drop: float = 0.0) -> nn.Module:
    """16 numbers in, 4 classes out."""
    layers = [nn.Linear(16, 32), *([nn.BatchNorm1d(32)] if norm else []), nn.ReLU()]
    layers += [nn.Dropout(drop)] if drop else []
    return with_weights(nn.Sequential(*layers, nn.Linear(32, 4)))


def points(count: int = 32) -> tuple[Tensor, Tensor]:
    """Numbers and the classes another perceptron of this kind gives them."""
    inputs = seeded(count, 16, seed=100)
    return inputs, (inputs @ seeded(16, 4, seed=101)).argmax(1)


class Shaken(Dataset[tuple[Tensor, Tensor]]):
    """Augments with torch's own generator, as images are."""

    def __init__(self, count: int) -> None:
        self.inputs, self.labels = points(count)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(16), self.labels[index]


def state_in(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint of a run holds."""
    state: dict[str, Any] = torch.load(io.BytesIO(read_checked(checkpoint)), weights_only=True)
    return state


def loader(count: int = 32, batch_size: int = 8, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*points(count)), batch_size=batch_size, shuffle=shuffle)
