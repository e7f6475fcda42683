"""`factorpack demo`: a real net on real digits, trained, compressed and measured in under two minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from factorpack.compression import compress
from factorpack.errors import SourceError
from factorpack.methods import QSPCA, Method, Scalar
from factorpack.packed import load, save
from factorpack.report.text import human_bytes

EPOCHS = 15
BATCH = 64
METHODS_SHOWN: dict[str, Method] = {
    "scalar-8bit": Scalar(bits=8),
    "scalar-4bit": Scalar(bits=4),
    "scalar-3bit": Scalar(bits=3),
    # A tile of 9 is one 3x3 kernel: a basis shared by all kernels of a layer, which small nets can afford.
    "factors-rank6-4bit": QSPCA(rank=6, latent_bits=4, tile=9, codebook_bits=8),
    "factors-rank6-3bit": QSPCA(rank=6, latent_bits=3, tile=9, codebook_bits=8),
    "factors-rank5-3bit": QSPCA(rank=5, latent_bits=3, tile=9, codebook_bits=8),
}

Split = tuple[Tensor, Tensor]


def demo(
    folder: Annotated[Path, typer.Option(help="Where the files are left.")] = Path("factorpack-demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train a small net on scikit-learn's handwritten digits, compress it six ways, and measure each file.

    Needs no download, no GPU and less than two minutes. The files stay in the folder to be inspected.
    """
    train, test = digits()
    model = train_net(train, quiet=as_json)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "digits.pt")
    rows = [("fp32 checkpoint", (folder / "digits.pt").stat().st_size, 1.0, accuracy(model, test))]
    for name, method in METHODS_SHOWN.items():
        path = folder / f"digits.{name}.safetensors"
        save(compress(model, method, progress=False), path)
        packed = load(path)  # what is measured is the file, not what was in memory
        report = packed.size()
        assert report.file_bytes is not None
        restored = packed.load_into(net()).eval()
        rows.append((name, report.file_bytes, report.file_ratio or 0.0, accuracy(restored, test)))
    if as_json:
        keys = ("name", "file_bytes", "file_ratio", "test_accuracy")
        print(
            json.dumps({"folder": str(folder), "rows": [dict(zip(keys, row, strict=True)) for row in rows]})
        )
    else:
        _show(rows, folder)


def net() -> nn.Sequential:
    """A convolutional net for 8x8 digits, a quarter of a million weights."""
    layers: list[nn.Module] = []
    for width_in, width, stride in ((1, 32, 1), (32, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(width_in, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def digits() -> tuple[Split, Split]:
    """1,797 real digits: three quarters to train on, the rest to test."""
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
    images, labels = split
    with torch.inference_mode():
        return float((model(images).argmax(1) == labels).float().mean())


def _show(rows: list[tuple[str, int, float, float]], folder: Path) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("file")
    for heading in ("bytes", "ratio", "test accuracy"):
        table.add_column(heading, justify="right")
    for name, file_bytes, ratio, score in rows:
        table.add_row(name, f"{file_bytes:,}", f"{ratio:.1f}", f"{score:.1%}")
    console = Console(highlight=False)
    console.print(table)
    total = human_bytes(sum(row[1] for row in rows))
    console.print(f"\nThe files ({total}) are in {folder}. Look into one:")
    console.print(f"  factorpack inspect {folder}/digits.factors-rank6-4bit.safetensors")
