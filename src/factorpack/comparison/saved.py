"""Reads the results of `factorpack compare`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factorpack.comparison.point import Point
from factorpack.errors import PlanError


@dataclass(frozen=True, slots=True)
class Comparison:
    """compare.json: the original's scores, and the points."""

    original: Mapping[str, float]
    points: tuple[Point, ...]


def read_comparison(path: Path) -> Comparison:
    """Reads compare.json; raises PlanError for any other file, or one with an invalid number."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        original = _numbers(document["original"])
        points = tuple(_point(fields) for fields in document["points"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(
            f"{path} holds no comparison: {error!r}; expected the compare.json of `factorpack compare`"
        ) from error
    return Comparison(original, points)


def _point(fields: Mapping[str, Any]) -> Point:
    point = Point(**{**fields, "measured": _numbers(fields["measured"])})
    _numbers({"file_ratio": point.file_ratio, "weight_error": point.weight_error})
    if type(point.file_bytes) is not int or not all(
        isinstance(word, str) for word in (point.method, point.settings, point.version)
    ):
        raise ValueError(f"a point of {point.file_bytes!r} bytes by {point.method!r}")
    return point


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, expected a number")
    return dict(values)
