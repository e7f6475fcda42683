"""The methods that are compared: all that have ladders of settings, and the planner."""

from __future__ import annotations

from collections.abc import Sequence

from factorpack.errors import PlanError
from factorpack.methods import METHODS, Method

PLANNED = "planned"
"""Not a method but the budget planner, which needs no ladder: it meets a size by itself."""
COMPARED: dict[str, type[Method]] = {name: method for name, method in METHODS.items() if method.ladders()}


def title_of(name: str) -> str:
    """What a method is called in tables and figures; one of another version keeps its own name."""
    if name == PLANNED:
        return "planned to a budget"
    return COMPARED[name].title if name in COMPARED else name


def choose_compared(names: Sequence[str]) -> list[str]:
    """Names of compared methods, the planner first; "all" is all of them."""
    known = [PLANNED, *COMPARED]
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise PlanError(f"unknown method {(unknown or [''])[0]!r}, known are all, {', '.join(known)}")
    return known if "all" in names else [name for name in known if name in names]
