"""What can go wrong, in five words a caller can catch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FactorpackError(Exception):
    """Base of every error factorpack raises on purpose."""


class PlanError(FactorpackError):
    """A setting is impossible: what was asked for and what is allowed are in the message."""


class WeightError(FactorpackError):
    """The weights themselves cannot be encoded (NaN, Inf, an unsupported type)."""


class SourceError(FactorpackError):
    """A checkpoint or model cannot be read as one, or does not fit the packed file."""


class FormatError(FactorpackError):
    """A packed file is damaged, hostile or from an unknown version."""


class EngineError(FactorpackError):
    """Work that was handed out did not come back: a worker died too often, or there is none."""


@contextmanager
def while_compressing(name: str) -> Iterator[None]:
    """Errors inside say which tensor it was."""
    try:
        yield
    except FactorpackError as error:
        error.add_note(f"while compressing tensor {name!r}")
        raise
