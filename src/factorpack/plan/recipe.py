"""Recipes: a plan as a TOML file.

exclude = ["*.running_*"]

[default]
method = "qspca"
rank = 128
latent_bits = 3

[layers."layer4.*"]
method = "scalar"
bits = 4
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factorpack.errors import PlanError
from factorpack.methods import METHODS, Method, from_fields
from factorpack.plan.rules import Rules

_KEYS = ("default", "layers", "exclude", "finetune")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a recipe states: which tensor gets which method, and settings of a fine-tuning run."""

    rules: Rules
    finetune: Mapping[str, Any]


def read_recipe(path: str | Path, fallback: Method) -> Recipe:
    """A recipe from its file; `fallback` is the method where it has no [default]."""
    try:
        document = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"the recipe {path} cannot be read: {error}") from error
    try:
        return _recipe(document, fallback)
    except PlanError as error:
        error.add_note(f"in the recipe {path}")
        raise


def _recipe(document: dict[str, Any], fallback: Method) -> Recipe:
    unknown = sorted(set(document) - set(_KEYS))
    if unknown:
        raise PlanError(f"unknown key {unknown[0]!r}, known are {', '.join(_KEYS)}")
    default, layers, exclude = (
        document.get("default"),
        document.get("layers", {}),
        document.get("exclude", []),
    )
    if not isinstance(layers, dict) or not isinstance(exclude, list):
        raise PlanError("layers is a table of tables, exclude a list of patterns")
    if not all(isinstance(pattern, str) for pattern in exclude):
        raise PlanError("exclude is a list of patterns, each a string")
    method = fallback if default is None else _method("default", default)
    finetune = document.get("finetune", {})
    if not isinstance(finetune, dict):
        raise PlanError("finetune is a table of settings")
    chosen = {pattern: _method(pattern, fields) for pattern, fields in layers.items()}
    return Recipe(Rules(method, chosen, exclude), finetune)


def _method(where: str, fields: object) -> Method:
    if not isinstance(fields, dict):
        raise PlanError(f"{where!r} is {fields!r}, expected a table with a method and its settings")
    try:
        return from_fields(METHODS, fields)
    except PlanError as error:
        error.add_note(f"in the table {where!r}")
        raise
