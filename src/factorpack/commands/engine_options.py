"""The options of commands that can run over an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from factorpack.engine import Engine, Local, Ray
from factorpack.errors import PlanError

ENGINES: dict[str, Callable[[int], Engine]] = {"local": Local, "ray": Ray}
"""Each from a number of workers; 0 is all there are."""

EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Spread the work: 'local' over processes here, 'ray' over a Ray cluster (or one it starts here). "
        "Killed, the same command goes on from what is done.",
        show_default=False,
    ),
]
EngineWorkers = Annotated[
    int,
    typer.Option(
        "--workers", help="With --engine: how many at once. Default: one a core.", show_default=False
    ),
]


def engine_of(name: str | None, workers: int) -> Engine | None:
    """The engine that the options name, None where they name none."""
    if name is None:
        if workers:
            raise PlanError(f"{workers} workers need an engine: say which with --engine local or ray")
        return None
    if name not in ENGINES:
        raise PlanError(f"unknown engine {name!r}, known are {', '.join(ENGINES)}")
    return ENGINES[name](workers)
