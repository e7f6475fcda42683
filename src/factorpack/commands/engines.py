"""The engines that --engine names."""

from __future__ import annotations

from collections.abc import Callable

from factorpack.engine import Engine, Local, Ray
from factorpack.errors import PlanError

ENGINES: dict[str, Callable[[int], Engine]] = {"local": Local, "ray": Ray}
"""Each is made from a number of workers; 0 means as many as there are cores."""


def engine_of(name: str | None, workers: int) -> Engine | None:
    """The engine that the options name, None where they name none."""
    if name is None:
        if workers:
            raise PlanError(f"{workers} workers need an engine: say which with --engine local or ray")
        return None
    if name not in ENGINES:
        raise PlanError(
            f"unknown engine {name!r}, known are {', '.join(ENGINES)}", found=name, allowed=list(ENGINES)
        )
    return ENGINES[name](workers)
