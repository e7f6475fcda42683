"""`factorpack compare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from factorpack.commands.console import print_json, print_line, print_table
from factorpack.commands.engines import engine_of
from factorpack.commands.options import BatchSize, EngineName, ImageSize, Json, Model, Samples, Workers
from factorpack.commands.shared_options import shows_bar
from factorpack.comparison.baselines import BASELINES, PEERS, PLANNED
from factorpack.comparison.figure import pareto, save_figure
from factorpack.comparison.point import Point
from factorpack.comparison.request import Request
from factorpack.errors import PlanError
from factorpack.format.atomic import atomic_write
from factorpack.printable import printable
from factorpack.report.text import plain


def compare(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="The checkpoint to compress.", show_default=False)
    ],
    model: Model,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A folder for the files, the points, the table and the figure."),
    ] = Path("comparison"),
    methods: Annotated[
        str,
        typer.Option(
            help=f"'all', or some of {PLANNED}, {', '.join(BASELINES)}, separated by commas; "
            f"and {', '.join(PEERS)}, which 'all' leaves out: it needs factorpack[nncodec]."
        ),
    ] = "all",
    ratios: Annotated[
        str, typer.Option(help="Times smaller than FP32, separated by commas.")
    ] = "5,10,20,30,40",
    calibration: Annotated[
        Path | None, typer.Option(help="A folder of images, no labels needed, for methods that use them.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with one folder per class, or with val/ (and train/) in it: measure accuracy."
        ),
    ] = None,
    epochs: Annotated[
        int, typer.Option(help="Train each of them on --data's train/ this long, the original as teacher.")
    ] = 0,
    learning_rate: Annotated[float, typer.Option(help="With --epochs: the initial rate.")] = 3e-4,
    samples: Samples = 256,
    batch_size: BatchSize = 64,
    image_size: ImageSize = 224,
    workers: Workers = 2,
    engine: EngineName = None,
    engine_workers: Annotated[
        int,
        typer.Option(help="With --engine: points at a time. Default: one per core.", show_default=False),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compress a model with every method at the same sizes, and measure each file.

    Every method gets the settings that come closest to the weights within each size. The folder then holds the
    files, one JSON per point, compare.json, compare.md, and the figure as PNG and SVG. If it is interrupted,
    the same command continues from the points that are done. With --engine methods are compared side by side;
    the seconds of a point then mean little, because others run at the same time.

    Example:

        factorpack compare resnet18.safetensors --model torchvision.models:resnet18
        --methods planned,qspca,lsq,vq --ratios 10,20,30 --calibration images/ --data imagenet
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
    points, original = request.run(engine_of(engine, engine_workers), progress=shows_bar(as_json))
    document = {"original": original, "points": [asdict(point) for point in points]}
    _write(output / "compare.json", json.dumps(document, indent=1))
    _write(output / "compare.md", markdown(points))
    draws = find_spec("matplotlib") is not None
    if original and draws:
        save_figure(pareto(points, original["top1"]), output / "compare.png")
    if as_json:
        print_json(document)
        return
    print_table(_table(points))
    if original and not draws:
        print_line(NO_FIGURE)
    print_line(f"{output}: {len(points)} points" + (f", original {original['top1']:.2%}" if original else ""))


NO_FIGURE = "No figure was drawn: that needs matplotlib (pip install 'factorpack[plots]')."
HEAD = ("method", "asked", "file ratio", "bytes", "weight error", "top-1", "compress, s", "settings")


def rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """The table of a comparison, one row per point."""
    return [
        (
            point.title,
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
    cells = [[printable(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


def _table(points: Sequence[Point]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in HEAD:
        left = name in ("method", "settings")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "settings")
    for line in rows(points):
        table.add_row(*map(plain, line))
    return table


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError as error:
        raise PlanError(f"ratios are {text!r}, expected numbers with commas, as 5,10,20") from error


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())
