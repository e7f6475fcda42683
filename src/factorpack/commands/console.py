"""What commands print: lines and tables for people, one JSON object for programs, errors on standard error.

A path or a name from a file may hold markup or codes that steer a terminal. `print_line` and `print_error`
take any text and disarm it; in tables it goes through `plain`. Neither console reads markup.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from factorpack.commands.shared_options import is_quiet
from factorpack.printable import printable


def _width() -> int | None:
    """A pipe has no width: 80 columns would fold every line of a table."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it is closed
    return None if is_terminal else 180


console = Console(highlight=False, markup=False, emoji=False, width=_width())
error_console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_line(text: str, style: str | None = None) -> None:
    """One line, however wide the terminal is and whatever is in the text."""
    if not is_quiet():
        console.print(printable(text), style=style, soft_wrap=True)


def print_text(text: str) -> None:
    """Text of ours as it is, for a file that it may be sent to."""
    if not is_quiet():
        print(text, end="")


def print_cell(text: Text) -> None:
    """A line in several colours, made of `plain` texts."""
    if not is_quiet():
        console.print(text, soft_wrap=True)


def print_table(table: Table) -> None:
    if not is_quiet():
        console.print(table)


def print_json(value: dict[str, Any]) -> None:
    # JSON leaves one control character as it is.
    print(json.dumps(value).replace("\x7f", "\\u007f"))


def print_error(error: Exception) -> None:
    """What an error says, and its notes below."""
    lines = [printable(text) for text in (_message(error), *getattr(error, "__notes__", []))]
    error_console.print("error: " + "\n  ".join(lines))


def print_json_error(kind: str, error: Exception | str) -> None:
    """The one object that a command with `--json` prints where it fails."""
    fields = {name: getattr(error, name, None) for name in ("tensor", "found", "allowed")}
    known = {name: _plain_value(value) for name, value in fields.items() if value is not None}
    message = _message(error) if isinstance(error, Exception) else error
    print_json(
        {"error": {"type": kind, "message": message, **known, "notes": getattr(error, "__notes__", [])}}
    )


def _plain_value(value: Any) -> Any:
    """A value that JSON has, or what it prints as."""
    return value if isinstance(value, str | int | float | list | tuple) else repr(value)


def print_warning(message: Warning | str) -> None:
    if not is_quiet():
        error_console.print(f"warning: {printable(message)}")


def print_note(message: str) -> None:
    """A line on how a file was read: beside the results, so that `--json` prints one object."""
    if not is_quiet():
        error_console.print(printable(message))


def _message(error: Exception) -> str:
    """An error from a process that reads images brings a traceback, whose last line says what is wrong."""
    text = str(error)
    return text.strip().splitlines()[-1].partition(": ")[2] if "Original Traceback" in text else text
