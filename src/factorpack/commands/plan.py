"""`factorpack plan` and `factorpack recipes`, and what `compress` shares with them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from factorpack.budget.preview import Preview, plan
from factorpack.errors import PlanError
from factorpack.methods import METHODS, Method, from_fields
from factorpack.planning.families import (
    AUTO,
    DEFAULT_METHOD,
    FAMILIES,
    NONE,
    family,
    family_text,
    named_recipe,
)
from factorpack.report.text import human_bytes, plain, printable
from factorpack.source import open_source

# A pipe has no width: 80 columns would fold every line of a table.
out = Console(highlight=False)
if not out.is_terminal:
    out = Console(highlight=False, width=160)

SETTINGS = (
    "rank",
    "latent_bits",
    "sparsity",
    "codebook_bits",
    "tile",
    "latent_scales",
    "center",
    "bits",
    "clip",
    "dtype",
)
CHOICES = ("source", "ratio", "max_bytes", "method", *SETTINGS, "recipe", "exclude", "as_json")
"""What `compress` can be told that decides what a file will be, but for a model and data."""


def preview(
    source: Path,
    top: Annotated[int | None, typer.Option(help="Only this many tensors, the largest first.")] = None,
    as_json: bool = False,
    **choices: Any,
) -> None:
    """Show what `compress` would do, tensor by tensor, and what it would take: nothing is written.

    Sizes and seconds are estimates: a sample of every weight, 65,536 numbers or a little more, is encoded,
    and of many weights of one shape the first three. With a budget they are those from the weights alone.

    Examples:

        factorpack plan resnet18.safetensors

        factorpack plan resnet18.safetensors --ratio 20

        factorpack plan model.pt --method scalar --bits 4 --json
    """
    settings = {key: choices[key] for key in SETTINGS if choices[key] is not None}
    method, recipe = choices["method"], choices["recipe"]
    ratio, max_bytes = choices["ratio"], choices["max_bytes"]
    if (ratio is not None or max_bytes is not None) and (method is not None or settings):
        raise PlanError("a budget chooses methods and settings itself: give one or the other")
    found = plan(
        source,
        asked_method(method, settings),
        ratio=ratio,
        max_bytes=max_bytes,
        exclude=choices["exclude"] or [],
        recipe=say_recipe(source, method, settings, recipe, quiet=as_json),
    )
    if as_json:
        print(json.dumps(_as_json(found)))
        return
    out.print(_table(found, top))
    for line in _totals(found):
        out.print(line)


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this one.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List the recipes that come with factorpack, or print one to start from.

    Example:

        factorpack recipes resnet > my.toml
    """
    if name is not None:
        text = family_text(name)
        print(json.dumps({"name": name, "text": text}) if as_json else text, end="\n" if as_json else "")
    elif as_json:
        listed = [{"name": each, "about": family(each).about} for each in sorted(FAMILIES)]
        print(json.dumps({"recipes": listed}))
    else:
        for each in sorted(FAMILIES):
            out.print(f"[bold]{each:13}[/bold] {family(each).about}")


def say_recipe(
    source: Path, method: str | None, settings: Mapping[str, Any], recipe: str | None, quiet: bool
) -> str | None:
    """The recipe to follow, by name; one that nobody asked for is said in a line."""
    if method is not None or settings:
        if recipe not in (None, NONE):
            raise PlanError("a recipe states methods and settings itself: give one or the other")
        return None
    found = named_recipe(recipe or AUTO, open_source(source), DEFAULT_METHOD)
    if found is None:
        return None
    if recipe is None and not quiet:
        out.print(f"recipe {found[0]}: {plain(found[1].about)} (--recipe none goes without)")
    return found[0]


def asked_method(name: str | None, settings: Mapping[str, Any]) -> Method | None:
    """The method that options state, or None where they state none."""
    if name is None and not settings:
        return None
    if name in (None, "qspca"):
        usual = {"rank": DEFAULT_METHOD.rank, "latent_bits": DEFAULT_METHOD.latent_bits}
        if "tile" in settings:
            usual["rank"] = min(usual["rank"], settings["tile"])
        return from_fields(METHODS, {"method": "qspca", **usual, **settings})
    return from_fields(METHODS, {"method": name, **settings})


def with_choices_of(command: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command that takes **choices the options of another: one list of them, not two alike."""

    def give(other: Callable[..., None]) -> Callable[..., None]:
        theirs, own = inspect.signature(command).parameters, inspect.signature(other).parameters
        hints = get_type_hints(other, include_extras=True) | get_type_hints(command, include_extras=True)
        kept = {key: theirs[key] for key in CHOICES}
        added = {key: each for key, each in own.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
        taken = [each.replace(annotation=hints[key]) for key, each in (kept | added).items()]
        taken.sort(key=lambda each: each.default is not inspect.Parameter.empty)  # what must be given, first
        other.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        other.__annotations__ = {each.name: each.annotation for each in taken}
        return other

    return give


def _table(found: Preview, top: int | None) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("tensor", "shape", "encoding"):
        table.add_column(heading, overflow="fold")
    for heading in ("bytes now", "then, about", "of the file"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", style="dim", overflow="fold")
    lines = list(found.tensors)
    if top is not None:
        lines = sorted(lines, key=lambda line: -line.bytes)[:top]
    for line in lines:
        table.add_row(
            plain(line.name),
            "x".join(map(str, line.shape)) or "-",
            line.words,
            f"{line.source_bytes:,}",
            f"{line.bytes:,}",
            f"{line.bytes / found.file_bytes:.1%}",
            plain(line.note),
        )
    return table


def _totals(found: Preview) -> list[str]:
    """What stands below the table."""
    now = sum(tensor.source_bytes for tensor in found.tensors)
    lines = [
        "",
        f"{human_bytes(now)} -> about {human_bytes(found.file_bytes)}, {found.file_ratio:.2f} times smaller "
        f"than FP32, in about {found.seconds:.1f} s",
        f"memory: about {human_bytes(found.compress_peak_bytes)} to compress, "
        f"{human_bytes(found.load_peak_bytes)} to load and decode, beside Python and torch themselves",
    ]
    if found.budget_bytes is not None and found.smallest_bytes is not None:
        lines.append(
            f"budget: {found.budget_bytes:,} bytes, never more and at most 1 % less; "
            f"the smallest that is possible: {found.smallest_bytes:,}"
        )
        lines.append(printable(f"planner: {found.planner}"))
        lines.append(
            "[dim]with --model and --calibration the same bytes are shared out by what matters[/dim]"
        )
    return lines


def _as_json(found: Preview) -> dict[str, Any]:
    document = asdict(found)
    tensors = [line | {"share": line["bytes"] / found.file_bytes} for line in document.pop("tensors")]
    totals = {"file_bytes": found.file_bytes, "file_ratio": found.file_ratio, "seconds": found.seconds}
    return {**totals, **document, "tensors": tensors}
