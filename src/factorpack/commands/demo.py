"""`factorpack demo`: a small net planned to byte budgets, beside plain rounding at the same sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from factorpack.commands.console import print_json, print_line, print_table
from factorpack.commands.options import Json
from factorpack.commands.shared_options import shows_bar
from factorpack.comparison import PLANNED, Point, compare
from factorpack.comparison.figure import pareto
from factorpack.digits import EPOCHS, Split, accuracy, digits, train_net
from factorpack.format.atomic import rename, scratch_folder
from factorpack.format.overwrite import make_folder

RATIOS = (8, 11, 16, 32, 64)
"""Rounding has a file at the first three, of 4, 3 and 2 bits."""
IMAGES = 64
ROUNDED = "scalar"
CHECKPOINT, FIGURE = "digits.pt", "demo.png"
NO_FIGURE = "No figure was drawn: that needs matplotlib (pip install 'factorpack[demo]')."


@dataclass(frozen=True, slots=True)
class Demo:
    """What a demo measured: the FP32 net, and a point per method and ratio."""

    folder: Path
    images: int
    """Unlabelled images that the planner was given."""
    test_images: int
    checkpoint_bytes: int
    accuracy: float
    points: Sequence[Point]
    figure: Path | None
    """None where matplotlib is not installed."""


def demo(
    folder: Annotated[Path, typer.Option(help="The folder to write the files to.")] = Path("factorpack-demo"),
    as_json: Json = False,
) -> None:
    """Plan a small net to byte budgets, beside plain rounding at the same sizes.

    A net is trained on handwritten digits. It is planned to five sizes with 64 unlabelled images and no further
    training. Plain rounding gets the most bits per weight whose file is no larger. Accuracy is measured on test
    images, with each file saved and loaded again. Needs no download and no GPU, and takes less than two minutes.
    The files, and a figure, stay in the folder.
    """
    done = run_demo(folder, progress=shows_bar(as_json))
    if as_json:
        print_json(_document(done))
    else:
        _show(done)


def run_demo(
    folder: Path,
    ratios: Sequence[float] = RATIOS,
    images: int = IMAGES,
    epochs: int = EPOCHS,
    progress: bool = True,
) -> Demo:
    """Trains the net, writes a packed file per method and ratio to `folder`, and measures each of them."""
    train, test = digits()
    make_folder(folder)
    model = train_net(train, quiet=not progress, epochs=epochs)
    # Beside the files of an earlier demo: compare would resume from its points.
    with scratch_folder(folder / "demo") as scratch:
        torch.save(model.state_dict(), scratch / CHECKPOINT)
        points = compare(
            model,
            ratios,
            scratch,
            methods=[PLANNED, ROUNDED],
            calibration=[train[0][:images]],
            evaluate=partial(_measure, test),
            progress=progress,
        )
        score = accuracy(model, test)
        drawn = _draw(points, score, scratch / FIGURE)
        for name in (CHECKPOINT, *(point.file for point in points), drawn and FIGURE):
            if name is not None:
                rename(scratch / name, folder / name)
    figure, size = drawn and folder / FIGURE, (folder / CHECKPOINT).stat().st_size
    return Demo(folder, images, len(test[1]), size, score, points, figure)


def _measure(test: Split, restored: nn.Module) -> dict[str, float]:
    return {"top1": accuracy(restored.eval(), test)}


def _draw(points: Sequence[Point], original: float, path: Path) -> Path | None:
    """Accuracy against size, as a PNG; None without matplotlib, which the demo can do without."""
    if find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    pareto(points, original, axes)
    axes.set(
        ylabel="test accuracy, %", ylim=(0, 105), title="The same net at the same sizes, without training"
    )
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    return path


def _document(done: Demo) -> dict[str, Any]:
    rows = [
        {
            "method": point.method,
            "requested_ratio": point.asked_ratio,
            "settings": point.settings,
            "file": point.file,
            "file_bytes": point.file_bytes if point.file else None,
            "file_ratio": point.file_ratio if point.file else None,
            "test_accuracy": point.measured.get("top1"),
        }
        for point in done.points
    ]
    return {
        "folder": str(done.folder),
        "images": done.images,
        "checkpoint_bytes": done.checkpoint_bytes,
        "test_accuracy": done.accuracy,
        "figure": str(done.figure) if done.figure else None,
        "rows": rows,
    }


def _show(done: Demo) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("times smaller", "planned, bytes", "accuracy", "rounded, bytes", "bits", "accuracy"):
        table.add_column(heading, justify="right")
    table.add_row("FP32", f"{done.checkpoint_bytes:,}", f"{done.accuracy:.1%}")
    for planned, rounded in _pairs(done.points):
        table.add_row(f"{planned.asked_ratio:g}", *_cells(planned), *_cells(rounded, with_bits=True))
    print_table(table)
    for line in _explanation(done):
        print_line(line)


def _pairs(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    rounded = {point.asked_ratio: point for point in points if point.method == ROUNDED}
    return [(point, rounded[point.asked_ratio]) for point in points if point.method == PLANNED]


def _cells(point: Point, with_bits: bool = False) -> list[str]:
    """A file's bytes and accuracy, and its bits per weight; dashes where the method makes no file so small."""
    if point.file is None:
        return ["-"] * (3 if with_bits else 2)
    bits = [point.settings.removeprefix("Scalar(bits=").removesuffix(")")] if with_bits else []
    return [f"{point.file_bytes:,}", *bits, f"{point.measured['top1']:.1%}"]


def _explanation(done: Demo) -> tuple[str, ...]:
    """What the table shows, where the files are, and what to type next."""
    packed = next(done.folder / point.file for point in done.points if point.file)
    absent = [point.settings for point in done.points if point.file is None]
    drawn = f"The figure is {done.figure}." if done.figure else NO_FIGURE
    return (
        "",
        f"Accuracy is on {done.test_images} test images, measured with each file saved and loaded again.",
        f"Planned: fp.compress(model, ratio=..., calibration=...) with {done.images} unlabelled images.",
        "Rounded: every weight to its nearest code, at the most bits per weight that fit, in the same",
        "entropy-coded file format, with batch norms folded and vectors in FP16 as in the planned files.",
        *([f"A dash: rounding makes no file that small; {absent[0]}."] if absent else []),
        f"The files are in {done.folder}. {drawn}",
        "",
        "Next:",
        f"  factorpack inspect {packed}",
        f"  factorpack report {packed} -o report.html --original {done.folder / CHECKPOINT}",
        f"  factorpack compress {done.folder / CHECKPOINT} -o small.safetensors --ratio 10",
    )
