"""The compared methods: all that have ladders of settings, the planner, and other packages."""

from __future__ import annotations

from collections.abc import Sequence

from factorpack.comparison.nncodec import NNCodec
from factorpack.errors import PlanError
from factorpack.methods import METHODS, Method

PLANNED = "planned"
"""The budget planner, which is not a method and needs no ladder: it takes the size itself."""
BASELINES: dict[str, type[Method]] = {name: method for name, method in METHODS.items() if method.ladders()}
PEERS: dict[str, type[NNCodec]] = {"nncodec": NNCodec}
"""Codecs of other packages, which write files of their own. They run only where they are named."""


def title_of(name: str, version: str = "") -> str:
    """A method's name in tables and figures; an unknown one, from another version, keeps its own."""
    if name == PLANNED:
        return "planned to a budget"
    known = BASELINES | PEERS
    return f"{known[name].title if name in known else name} {version}".strip()


def select_methods(names: Sequence[str]) -> list[str]:
    """Checks method names and puts them in order, the planner first; "all" means every method of ours."""
    known = [PLANNED, *BASELINES, *PEERS]
    unknown = [name for name in names if name not in (*known, "all")]
    if unknown or not names:
        raise PlanError(f"unknown method {(unknown or [''])[0]!r}, known are all, {', '.join(known)}")
    chosen = {*names, PLANNED, *BASELINES} if "all" in names else names
    return [name for name in known if name in chosen]
