"""One method at one size: what was measured, and the names of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from factorpack.comparison.baselines import PEERS, title_of


@dataclass(frozen=True, slots=True)
class Point:
    """One method at one size. `file` is None if the method cannot make a file that small."""

    method: str
    asked_ratio: float
    """0 if it was not made for a ratio."""
    settings: str
    file: str | None = None
    file_bytes: int = 0
    file_ratio: float = 0.0
    weight_error: float = 0.0
    """Squared error of all coded weights divided by their energy."""
    compress_s: float = 0.0
    measured: Mapping[str, float] = field(default_factory=dict)
    trained: Mapping[str, Any] = field(default_factory=dict)
    """The schedule it was finetuned with; empty if it was not."""
    version: str = ""
    """Of the package that made it; empty for ours."""

    @property
    def title(self) -> str:
        """The method's name in tables and figures."""
        return title_of(self.method, self.version)


def files_of(methods: Sequence[str], ratios: Sequence[float]) -> list[str]:
    """Names of all files written for these methods and ratios."""
    pairs = [(name, ratio) for name in methods for ratio in ratios]
    return [make(name, ratio) for name, ratio in pairs for make in (file_name, point_name)]


def file_name(method: str, ratio: float) -> str:
    """A method's file: a packed one, or another package's own."""
    suffix = PEERS[method].suffix if method in PEERS else ".packed.safetensors"
    return f"{method}-{ratio:g}{suffix}"


def point_name(method: str, ratio: float) -> str:
    """The record of a point."""
    return f"{method}-{ratio:g}.json"
