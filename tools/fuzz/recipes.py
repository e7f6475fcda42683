"""Made-up recipes.

A recipe is text from anywhere. It may become a Recipe that plans a model, or a PlanError, and nothing else:
no other exception, no long wait.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from factorpack.errors import PlanError
from factorpack.methods import METHODS, QSPCA
from factorpack.planning.families import FAMILIES, family_text
from factorpack.planning.recipe import recipe_from
from factorpack.source import open_source
from tools.fuzz.loop import Result, Run, Target

FALLBACK = QSPCA(rank=16, latent_bits=4)
MODEL = open_source(
    {
        "conv1.weight": torch.empty(8, 3, 3, 3),
        "layer1.0.conv1.weight": torch.empty(8, 8, 3, 3),
        "fc.weight": torch.empty(10, 8),
        "fc.bias": torch.empty(10),
        "steps": torch.tensor(7),
    }
)
"""What a recipe that could be read is planned for."""


_WORDS = st.sampled_from(
    [
        "default",
        "layers",
        "exclude",
        "finetune",
        "about",
        "match",
        "method",
        "bits",
        "rank",
        "latent_bits",
        "solver",
        "steps",
        *METHODS,
        *sorted({name for cls in METHODS.values() for name in getattr(cls, "__dataclass_fields__", {})}),
    ]
)
_PATTERNS = st.one_of(
    st.sampled_from(["*", "conv1.weight", "re:.*", "re:(", "re:(a+)+$", "[", "layer?.*", "fc.*", ""]),
    st.text(max_size=12),
)
_SCALARS = st.one_of(
    st.integers(-3, 20),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=6),
    _WORDS,
    st.datetimes(),
    st.dates(),
    st.times(),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(_WORDS, _PATTERNS), inner, max_size=3)
    ),
    max_leaves=6,
)


_LIKELY = st.one_of(
    st.integers(1, 9),
    st.floats(0.01, 0.99),
    st.booleans(),
    st.sampled_from(["mse", "minmax", "row", "column", "float16", "small", "large"]),
)


@st.composite
def _tables(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """A method's table: its own settings, with values that may or may not be any."""
    name = draw(st.sampled_from(sorted(METHODS)))
    known = list(METHODS[name].__dataclass_fields__)  # type: ignore[attr-defined]
    return {"method": name, **draw(st.dictionaries(st.sampled_from(known), values, max_size=3))}


def _documents(
    tables: st.SearchStrategy[Any], patterns: st.SearchStrategy[Any], anything: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    known = {
        "about": st.one_of(st.text(max_size=20), anything),
        "match": patterns,
        "exclude": patterns,
        "default": tables,
        "layers": st.one_of(st.dictionaries(_PATTERNS, tables, max_size=3), anything),
        "finetune": st.one_of(st.dictionaries(_WORDS, _SCALARS, max_size=3), anything),
    }
    return st.fixed_dictionaries({}, optional=known)


_KEEP = st.sampled_from([{"method": "keep"}, {"method": "scalar", "bits": 5}, {"method": "ttq"}])
_LIKELY_DOCUMENTS = _documents(
    st.one_of(_KEEP, _tables(_LIKELY)),
    st.lists(st.sampled_from(["*", "re:.*", "conv1.*", "fc.*"]), max_size=2),
    st.nothing(),
)
_WILD_DOCUMENTS = _documents(
    st.one_of(_tables(_VALUES), _VALUES), st.one_of(st.lists(_PATTERNS, max_size=3), _VALUES), _VALUES
)


def _toml(value: Any) -> str:
    """A value as TOML writes it; what TOML has no word for becomes text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    return value.isoformat() if hasattr(value, "isoformat") else _text(value)


def _text(value: str) -> str:
    return json.dumps(value)


@st.composite
def _damaged(draw: st.DrawFn) -> str:
    """A family's own recipe with a piece gone, another come, or one in another's place."""
    text = family_text(draw(st.sampled_from(FAMILIES)))
    start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 40))
    piece = draw(st.one_of(st.text(max_size=8), st.just(text[length : length + 30]), _WORDS))
    return text[:start] + piece + text[start + length :]


@st.composite
def _written(draw: st.DrawFn) -> str:
    document = draw(st.one_of(_LIKELY_DOCUMENTS, _WILD_DOCUMENTS))
    return "\n".join(f"{_text(key)} = {_toml(value)}" for key, value in document.items())


RECIPES = st.one_of(_written(), _written(), _damaged(), st.text(max_size=200))


def judge(text: str) -> Result:
    """What a recipe came to; whatever must not happen is raised."""
    try:
        recipe = recipe_from(text, FALLBACK, "fuzz.toml")
    except PlanError:
        return "refused", 0
    try:
        recipe.recognises(MODEL)
        recipe.rules_for(MODEL).plan(MODEL)
    except PlanError:
        return "read, and fits no model", 0
    return "planned", 0


def drive(cases: int, number: int, run: Run) -> None:
    """Runs `cases` recipes; those of a seed are always the same."""

    @seed(number)
    @settings(
        max_examples=cases,
        database=None,
        derandomize=False,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(RECIPES)
    def one(text: str) -> None:
        run(repr(text), partial(judge, text))

    one()


TARGET = Target(drive=drive)
