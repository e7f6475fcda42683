"""`factorpack demo`: a real net on real digits, trained, compressed and measured in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from factorpack.commands.console import print_json, print_line, print_table
from factorpack.commands.options import Json
from factorpack.compression import compress
from factorpack.digits import accuracy, digits, net, train_net
from factorpack.methods import QSPCA, Method, Scalar
from factorpack.packed import load, save
from factorpack.report.text import human_bytes

METHODS_SHOWN: dict[str, Method] = {
    "scalar-8bit": Scalar(bits=8),
    "scalar-4bit": Scalar(bits=4),
    "scalar-3bit": Scalar(bits=3),
    # A tile of 9 is one 3x3 kernel: a basis shared by all kernels of a layer, which small nets can afford.
    "factors-rank6-4bit": QSPCA(rank=6, latent_bits=4, tile=9, codebook_bits=8),
    "factors-rank6-3bit": QSPCA(rank=6, latent_bits=3, tile=9, codebook_bits=8),
    "factors-rank5-3bit": QSPCA(rank=5, latent_bits=3, tile=9, codebook_bits=8),
}


def demo(
    folder: Annotated[Path, typer.Option(help="Where the files are left.")] = Path("factorpack-demo"),
    as_json: Json = False,
) -> None:
    """Train a small net on handwritten digits, compress it, and measure each file.

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
        print_json({"folder": str(folder), "rows": [dict(zip(keys, row, strict=True)) for row in rows]})
    else:
        _show(rows, folder)


def _show(rows: list[tuple[str, int, float, float]], folder: Path) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("file")
    for heading in ("bytes", "ratio", "test accuracy"):
        table.add_column(heading, justify="right")
    for name, file_bytes, ratio, score in rows:
        table.add_row(name, f"{file_bytes:,}", f"{ratio:.1f}", f"{score:.1%}")
    print_table(table)
    total = human_bytes(sum(row[1] for row in rows))
    print_line(f"\nThe files ({total}) are in {folder}. Look into one:")
    print_line(f"  factorpack inspect {folder}/digits.factors-rank6-4bit.safetensors")
