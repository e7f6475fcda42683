"""Settings: built from tables, checked, and spaced for comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from factorpack.errors import PlanError


def build_settings(cls: Any, settings: Mapping[str, Any], what: str) -> Any:
    """An instance of a settings dataclass; unknown and missing settings are errors that say what is known."""
    declared = [field for field in dataclasses.fields(cls) if field.init]
    known = [field.name for field in declared]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise PlanError(
            f"unknown setting {unknown[0]!r} for {what}, known are {', '.join(known)}",
            found=unknown[0],
            allowed=known,
        )
    absent = [
        field.name
        for field in declared
        if field.default is dataclasses.MISSING and field.name not in settings
    ]
    if absent:
        raise PlanError(f"{what} needs the setting {absent[0]!r}")
    return cls(**settings)


def check_type(name: str, value: object, *allowed: type) -> None:
    """Settings come from recipes too, where a string may take a number's place."""
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        words = " or ".join(kind.__name__ for kind in allowed)
        raise PlanError(f"{name} is {value!r}, a {type(value).__name__}; expected {words}", found=value)


def powers_of_two(low: int, high: int) -> list[int]:
    """Two to the power of everything from `low` to `high`."""
    return [1 << power for power in range(low, high + 1)]


def geometric(low: float, high: float, count: int) -> list[float]:
    """Values from `low` to `high`, each the same factor from the next."""
    return [low * (high / low) ** (place / (count - 1)) for place in range(count)]
