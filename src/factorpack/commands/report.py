"""`factorpack report`: what is in a packed file, on one page for a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from factorpack.budget.curves import load_curves
from factorpack.commands.console import print_json, print_line
from factorpack.commands.options import Json, PackedFile
from factorpack.comparison.saved import read_comparison
from factorpack.errors import PlanError
from factorpack.format.container import check_target
from factorpack.format.overwrite import check_output
from factorpack.model_reference import import_model
from factorpack.packed import load
from factorpack.printable import printable
from factorpack.report.facts import ComparisonFacts, PointFacts, gather
from factorpack.report.html import write_page
from factorpack.report.text import human_bytes
from factorpack.source import Checkpoint

_REFERENCE = re.compile(r"[\w.]{2,}:[\w.-]+")
"""`module:callable`; a single letter would be a drive."""


def report(
    file: PackedFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The .html file to write.", show_default=False)
    ],
    original: Annotated[
        str | None,
        typer.Option(
            help="The checkpoint it was made from, or module:callable: show the error of each weight."
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="The compare.json of `factorpack compare`: accuracy by size. Can be repeated."),
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(help="What `compress --curves` kept: how each weight's loss falls with its bytes."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write an HTML page about a packed file: where the bytes are and what they cost.

    The page goes layer by layer. It is a single file that needs no network and works in any current browser.

    Example:

        factorpack report resnet18.packed.safetensors -o report.html --original resnet18.safetensors
        --compare comparison/compare.json --curves curves.json
    """
    check_output(output, file, curves, original, *(compare or []))
    check_target(output)
    if output.exists() and not force:
        raise PlanError(f"{output} exists already: choose another file, or replace it with --force")
    known = None
    if curves is not None:
        known = load_curves(curves)
        if known is None:
            raise PlanError(f"there is no file {curves} with curves")
    comparisons = [comparison_facts(path) for path in compare or []]
    facts = gather(load(file), _checkpoint(original), known, comparisons)
    written = write_page(facts, output)
    if as_json:
        problems = {tensor.name: tensor.problem for tensor in facts.tensors if tensor.problem}
        found = {"path": str(output), "bytes": written, "tensors": len(facts.tensors)}
        print_json({**found, "weight_error": facts.error, "problems": problems})
    else:
        print_line(
            f"{output}: {human_bytes(written)}, a page on {len(facts.tensors)} tensors of {facts.file}"
        )


def comparison_facts(path: Path) -> ComparisonFacts:
    """The points of a comparison that have a file: their accuracy, or weight error where none was measured."""
    saved = read_comparison(path)
    made = [point for point in saved.points if point.file and point.file_bytes > 0]
    if not made:
        raise PlanError(f"{path} holds no point with a file: there is nothing to show")
    scored = [point for point in made if "top1" in point.measured]
    points = tuple(
        PointFacts(
            printable(point.title),
            point.file_bytes,
            point.file_ratio,
            point.measured["top1"] if scored else point.weight_error,
            printable(point.settings),
        )
        for point in scored or made
    )
    return ComparisonFacts(
        title=printable(path.resolve().parent.name if path.stem == "compare" else path.stem),
        measure="top-1" if scored else "weight error",
        original=saved.original.get("top1") if scored else None,
        original_bytes=round(made[0].file_bytes * made[0].file_ratio),
        points=points,
    )


def _checkpoint(original: str | None) -> Checkpoint | None:
    """What `module:callable` makes, and a path where there is one of that name or the name is no such reference."""
    if original is None or Path(original).exists() or not _REFERENCE.fullmatch(original):
        return original
    return import_model(original)
