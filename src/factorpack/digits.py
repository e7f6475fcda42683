"""A small net on real digits, for the demo and the examples."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from factorpack.errors import SourceError

EPOCHS = 15
BATCH = 64

Split = tuple[Tensor, Tensor]


def net() -> nn.Sequential:
    """A convolutional net for 8x8 images of digits, with a quarter of a million weights."""
    layers: list[nn.Module] = []
    for width_in, width, stride in ((1, 32, 1), (32, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def digits() -> tuple[Split, Split]:
    """1,797 real handwritten digits: three quarters for training, the rest for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SourceError("the demo needs scikit-learn: pip install 'factorpack[demo]'") from error
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]
    return (images[train], labels[train]), (images[test], labels[test])


def train_net(train: Split, quiet: bool = False, epochs: int = EPOCHS) -> nn.Sequential:
    """Trains `net` on images and labels, the same way every time."""
    images, labels = train
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = net()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    console = Console(stderr=True)
    steps = track(range(epochs), "training", console=console, disable=quiet or not console.is_terminal)
    for _ in steps:
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def accuracy(model: nn.Module, split: Split) -> float:
    """The share of images whose label the model predicts."""
    images, labels = split
    with torch.inference_mode():
        return float((model(images).argmax(1) == labels).float().mean())
