"""Recipes: a plan as a TOML file.

about = "What it is for, in a sentence."
match = ["layer1.*"]
exclude = ["*.running_*"]

[default]
method = "qspca"
rank = 128
latent_bits = 3

[layers."layer4.*"]
method = "scalar"
bits = 4

docs/recipes.md has every key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from factorpack.errors import PlanError
from factorpack.methods import METHODS, Method, from_fields
from factorpack.planning.rules import Rules, is_depthwise, matches
from factorpack.source import Source

KEYS = ("default", "layers", "exclude", "finetune", "about", "match", "depthwise", "classifier")
_METHOD_KEYS = ("default", "depthwise", "classifier")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a recipe states: which tensor gets which method, and settings of a fine-tuning run."""

    rules: Rules
    finetune: Mapping[str, Any]
    about: str = ""
    match: Sequence[str] = ()
    """Patterns that each find a tensor in every model the recipe is for; none where it is for one model."""

    def recognises(self, source: Source) -> bool:
        return bool(self.match) and all(_finds(pattern, source) for pattern in self.match)

    def rules_for(self, source: Source) -> Rules:
        """A recipe for many models may name layers that this one lacks; one for a single model may not."""
        if not self.match:
            return self.rules
        layers = {pattern: method for pattern, method in self.rules.layers.items() if _finds(pattern, source)}
        exclude = [pattern for pattern in self.rules.exclude if _finds(pattern, source)]
        return replace(self.rules, layers=layers, exclude=exclude)

    def kept_by(self, source: Source) -> tuple[dict[str, Method], Sequence[str]]:
        """What a budget takes from a recipe, as layers and exclusions: all that it keeps, and no other method."""
        rules = self.rules_for(source)
        kept: dict[str, Method] = {
            pattern: method for pattern, method in rules.layers.items() if method.keeps
        }
        if rules.depthwise is not None and rules.depthwise.keeps:
            names = (name for name, entry in source.entries.items() if is_depthwise(entry))
            kept |= dict.fromkeys((f"re:{re.escape(name)}" for name in names), rules.depthwise)
        return kept, rules.exclude


def _finds(pattern: str, source: Source) -> bool:
    return any(matches(pattern, name) for name in (*source.entries, *source.aliases))


def read_recipe(path: str | Path, fallback: Method) -> Recipe:
    """A recipe from its file; `fallback` is the method where it has no [default]."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlanError(f"the recipe {path} cannot be read: {error}") from error
    return recipe_from(text, fallback, str(path))


def recipe_from(text: str, fallback: Method, where: str) -> Recipe:
    """A recipe from its text; errors say it is in `where`."""
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise PlanError(f"the recipe {where} cannot be read: {error}") from error
    try:
        return recipe_from_document(document, fallback)
    except PlanError as error:
        error.add_note(f"in the recipe {where}")
        raise


def recipe_from_document(document: Mapping[str, Any], fallback: Method) -> Recipe:
    """What a recipe's document states."""
    unknown = sorted(set(document) - set(KEYS))
    if unknown:
        raise PlanError(f"unknown key {unknown[0]!r}, known are {', '.join(KEYS)}")
    about = document.get("about", "")
    if not isinstance(about, str):
        raise PlanError(f"about is {about!r}, expected a sentence")
    given = {key: _method(key, document[key]) for key in _METHOD_KEYS if key in document}
    layers = {pattern: _method(pattern, fields) for pattern, fields in _table(document, "layers").items()}
    exclude = _patterns(document, "exclude")
    method = given.get("default", fallback)
    rules = Rules(method, layers, exclude, given.get("depthwise"), given.get("classifier"))
    return Recipe(rules, _table(document, "finetune"), about, _patterns(document, "match"))


def _table(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = document.get(key, {})
    if not isinstance(table, dict):
        raise PlanError(f"{key} is {table!r}, expected a table")
    return table


def _patterns(document: Mapping[str, Any], key: str) -> list[str]:
    patterns = document.get(key, [])
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise PlanError(f"{key} is {patterns!r}, expected a list of patterns, each a string")
    return patterns


def _method(where: str, fields: object) -> Method:
    if not isinstance(fields, dict):
        raise PlanError(f"{where!r} is {fields!r}, expected a table with a method and its settings")
    try:
        return from_fields(METHODS, fields)
    except PlanError as error:
        error.add_note(f"in the table {where!r}")
        raise
