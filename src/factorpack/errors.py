"""The errors that factorpack raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FactorpackError(Exception):
    """Base class of every error that factorpack raises on purpose."""


class PlanError(FactorpackError):
    """A setting is impossible; the message says what was requested and what is allowed."""


class WeightError(FactorpackError):
    """The weights cannot be encoded (NaN, infinity, an unsupported dtype)."""


class SourceError(FactorpackError):
    """A checkpoint or model cannot be read, or does not match the packed file."""


class FormatError(FactorpackError):
    """A packed file is damaged, hostile or from an unknown version."""


class EngineError(FactorpackError):
    """Work did not finish in another process: a worker died too often, or none could start."""


@contextmanager
def while_compressing(name: str) -> Iterator[None]:
    """Adds the tensor's name to errors raised inside the block."""
    try:
        yield
    except FactorpackError as error:
        error.add_note(f"while compressing tensor {name!r}")
        raise
