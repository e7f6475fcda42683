"""The compared methods: all that have ladders of settings, and the planner."""

from __future__ import annotations

from collections.abc import Sequence

from factorpack.errors import PlanError
from factorpack.methods import METHODS, Method

PLANNED = "planned"
"""The budget planner, which is not a method and needs no ladder: it takes the size itself."""
BASELINES: dict[str, type[Method]] = {name: method for name, method in METHODS.items() if method.ladders()}


def title_of(name: str) -> str:
    """A method's name in tables and figures; an unknown one, from another version, keeps its own."""
    if name == PLANNED:
        return "planned to a budget"
    return BASELINES[name].title if name in BASELINES else name


def select_methods(names: Sequence[str]) -> list[str]:
    """Checks method names and puts them in order, the planner first; "all" means every method."""
    known = [PLANNED, *BASELINES]
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise PlanError(f"unknown method {(unknown or [''])[0]!r}, known are all, {', '.join(known)}")
    return known if "all" in names else [name for name in known if name in names]
