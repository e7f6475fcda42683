"""Which recipe suits a family: bytes, weight error, and on training images how close the answers stay."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import Images, checkpoint, imagenet_train, pretrained, shuffled
from benchmarks.measure import fidelity, predictions, reloaded
from factorpack.comparison.grid import weight_error
from factorpack.planning.families import DEFAULT_METHOD
from factorpack.planning.recipe import recipe_from_document

NEVER_SHUFFLED_BEFORE = 3
"""A seed of its own, so that the choice is not made on images that other settings were chosen on."""


def run(model: str, recipes: list[dict[str, Any]], images: int = 0) -> dict[str, Any]:
    """`images` of the training set to compare answers on; 0 for a checkpoint without a model of ours.

    A recipe may have a `ratio` beside its keys: a budget then, which takes from it what is kept raw.
    """
    judge = _Judge(model, images) if images else None
    return {"rows": [_row(checkpoint(model), recipe, judge) for recipe in recipes]}


class _Judge:
    """The original's answers on some training images, and another's beside them."""

    def __init__(self, model: str, count: int) -> None:
        self.net: nn.Module = pretrained(model)
        pictures, labels = shuffled(imagenet_train(), NEVER_SHUFFLED_BEFORE)
        self.images: Images = (pictures[:count], labels[:count])
        self.wanted: Tensor = predictions(self.net, self.images[0])

    def fidelity(self, packed: fp.Packed) -> dict[str, float]:
        found = predictions(packed.load_into(self.net), self.images[0])
        return fidelity(found, self.wanted, self.images[1])


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
