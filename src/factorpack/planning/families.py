"""Recipes that come with the package, one a family of models, and the choice among all recipes there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from factorpack.errors import PlanError
from factorpack.methods import QSPCA, Keep, Method, Scalar
from factorpack.planning.recipe import Recipe, read_recipe, recipe_from
from factorpack.planning.rules import Rules
from factorpack.source import Source

FAMILIES = ("resnet", "efficientnet", "mobilenet", "vit", "bert", "llama")
"""The order they are tried in: timm calls the layers of both depthwise families alike, and EfficientNets,
which have more of them, are recognised first."""
AUTO, NONE = "auto", "none"
DEFAULT_METHOD = QSPCA(rank=256, latent_bits=5)
"""What a weight gets where neither the caller nor a recipe names a method."""


def family_text(name: str) -> str:
    """A family's recipe as it is written."""
    if name not in FAMILIES:
        known = sorted(FAMILIES)
        raise PlanError(f"unknown recipe {name!r}, known are {', '.join(known)}", found=name, allowed=known)
    return (files("factorpack") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


@cache
def family(name: str) -> Recipe:
    return recipe_from(family_text(name), Scalar(8), name)


def recognised(source: Source) -> str | None:
    """The family a model is of, by the names of its tensors."""
    return next((name for name in FAMILIES if family(name).recognises(source)), None)


def named_recipe(wanted: str | Path, source: Source, fallback: Method) -> tuple[str, Recipe] | None:
    """The recipe that a caller names, with its name: "auto", "none", a family, or a file."""
    if wanted == AUTO:
        wanted = recognised(source) or NONE
    if wanted == NONE:
        return None
    if wanted in FAMILIES:
        return str(wanted), family(str(wanted))
    if not Path(wanted).is_file():
        known = ", ".join((AUTO, NONE, *sorted(FAMILIES)))
        raise PlanError(f"the recipe {str(wanted)!r} is none of {known}, and no file of that name is there")
    return str(wanted), read_recipe(wanted, fallback)


def recipe_file(recipe: str | Path | None) -> Path | None:
    """The file that a recipe is read from; None where it is a family's, or none."""
    is_file = recipe is not None and recipe not in (AUTO, NONE, *FAMILIES) and Path(recipe).is_file()
    return Path(recipe) if recipe is not None and is_file else None


def resolve_rules(
    recipe: str | Path | None,
    source: Source,
    method: Method | None,
    layers: Mapping[str, Method],
    exclude: Sequence[str],
    fallback: Method,
    budget: bool = False,
) -> tuple[str, Rules]:
    """A caller's rules, with a recipe's behind them where one is named; and that recipe's name."""
    found = named_recipe(recipe, source, fallback) if recipe is not None else None
    if found is None:
        return "", Rules(method or fallback, layers, exclude)
    if method is not None:
        raise PlanError("a recipe states methods and settings itself: give one or the other")
    name, found_recipe = found
    rules = found_recipe.rules_for(source)
    if budget:
        rules = Rules(fallback, *found_recipe.kept_by(source))
    if not layers:
        return name, replace(rules, exclude=[*exclude, *rules.exclude])
    # A caller's method comes before a recipe's wish to keep, and `exclude` would come before both.
    behind: dict[str, Method] = {**dict.fromkeys(rules.exclude, Keep()), **rules.layers}
    others = {pattern: behind[pattern] for pattern in behind if pattern not in layers}
    return name, replace(rules, layers={**layers, **others}, exclude=exclude)
