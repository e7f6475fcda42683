"""`factorpack compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from factorpack.commands.engine_options import EngineName, engine_of
from factorpack.commands.finetune import BatchSize, ImageSize, Json, Model, Workers
from factorpack.comparison.figure import pareto, save_figure
from factorpack.comparison.grid import Point
from factorpack.comparison.opponents import COMPARED, PLANNED, title_of
from factorpack.comparison.request import Request
from factorpack.errors import PlanError
from factorpack.format.atomic import atomic_write

# A pipe has no width: 80 columns would cut the table.
console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 180)


def compare(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="The checkpoint to compress.", show_default=False)
    ],
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A folder for files, points, table and figure.")
    ] = Path("comparison"),
    methods: Annotated[
        str, typer.Option(help=f"'all', or some of {PLANNED}, {', '.join(COMPARED)}, with commas.")
    ] = "all",
    ratios: Annotated[str, typer.Option(help="Times smaller than FP32, with commas.")] = "5,10,20,30,40",
    calibration: Annotated[
        Path | None, typer.Option(help="A folder of pictures, no labels needed, for methods that use them.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with a folder a class, or with val/ (and train/) in it: measure accuracy."
        ),
    ] = None,
    epochs: Annotated[
        int, typer.Option(help="Train each of them on --data's train/ this long, the original as teacher.")
    ] = 0,
    learning_rate: Annotated[float, typer.Option(help="With --epochs: the first rate.")] = 3e-4,
    samples: Annotated[int, typer.Option(help="Pictures to calibrate on.")] = 256,
    batch_size: BatchSize = 64,
    image_size: ImageSize = 224,
    workers: Workers = 2,
    engine: EngineName = None,
    engine_workers: Annotated[
        int,
        typer.Option(help="With --engine: points at once. Default: one a core.", show_default=False),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compress a model with every method at the same sizes, and measure what each file is worth.

    Every method gets the settings that come closest to the weights within each size. The folder then holds the
    files, a JSON a point, compare.json, compare.md, and the figure as PNG and SVG. Interrupted, the same
    command goes on from the points that are done. With --engine methods are compared side by side; the
    seconds of a point then say little, because others run beside it.

    Example:

        factorpack compare resnet18.safetensors --model torchvision.models:resnet18
        --methods planned,qspca,lsq,vq --ratios 10,20,30 --calibration pictures/ --data imagenet
    """
    request = Request(
        source,
        model,
        output,
        [name.strip() for name in methods.split(",")],
        _numbers(ratios),
        calibration,
        data,
        epochs,
        learning_rate,
        samples,
        batch_size,
        image_size,
        workers,
    )
    points, original = request.run(engine_of(engine, engine_workers), progress=not as_json)
    document = {"original": original, "points": [asdict(point) for point in points]}
    _write(output / "compare.json", json.dumps(document, indent=1))
    _write(output / "compare.md", markdown(points))
    if original:
        save_figure(pareto(points, original["top1"]), output / "compare.png")
    if as_json:
        print(json.dumps(document))
        return
    console.print(_table(points))
    console.print(
        f"{output}: {len(points)} points" + (f", original {original['top1']:.2%}" if original else "")
    )


HEAD = ("method", "asked", "file ratio", "bytes", "weight error", "top-1", "compress, s", "settings")


def rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """The table of a comparison, a row a point."""
    return [
        (
            title_of(point.method),
            f"{point.asked_ratio:g}",
            *(
                (f"{point.file_ratio:.2f}", f"{point.file_bytes:,}", f"{point.weight_error:.4f}")
                if point.file
                else ("-", "-", "-")
            ),
            f"{point.measured['top1']:.2%}" if "top1" in point.measured else "-",
            f"{point.compress_s:.1f}" if point.file else "-",
            point.settings,
        )
        for point in points
    ]


def markdown(points: Sequence[Point]) -> str:
    lines = [HEAD, ("---",) * len(HEAD), *rows(points)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _table(points: Sequence[Point]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in HEAD:
        left = name in ("method", "settings")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "settings")
    for line in rows(points):
        table.add_row(*line)
    return table


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise PlanError(f"ratios are {text!r}, expected numbers with commas, as 5,10,20") from error


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())
