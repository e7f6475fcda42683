"""The errors that factorpack raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FactorpackError(Exception):
    """Base class of every error that factorpack raises on purpose.

    The message is for people. For programs, three fields have what it says, where they apply, and are None elsewhere.
    """

    def __init__(
        self, message: str = "", *, tensor: str | None = None, found: Any = None, allowed: Any = None
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        """The tensor that it is about."""
        self.found = found
        """The value that is wrong."""
        self.allowed = allowed
        """What it may be: a limit, or a list of all values."""


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
def while_compressing(*names: str) -> Iterator[None]:
    """Adds the tensor's name, or those of tensors that are compressed together, to errors raised inside the block."""
    try:
        yield
    except FactorpackError as error:
        error.add_note(f"while compressing tensor {', '.join(names)!r}")
        if error.tensor is None and len(names) == 1:
            error.tensor = names[0]
        raise
