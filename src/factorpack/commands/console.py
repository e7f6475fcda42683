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

from factorpack.printable import printable

# A pipe has no width: 80 columns would fold every line of a table.
console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 180)
error_console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_line(text: str, style: str | None = None) -> None:
    """One line, however wide the terminal is and whatever is in the text."""
    console.print(printable(text), style=style, soft_wrap=True)


def print_table(table: Table) -> None:
    console.print(table)


def print_json(value: dict[str, Any]) -> None:
    # JSON leaves one control character as it is.
    print(json.dumps(value).replace("\x7f", "\\u007f"))


def print_error(error: Exception) -> None:
    """What an error says, and its notes below."""
    lines = [printable(text) for text in (_message(error), *getattr(error, "__notes__", []))]
    error_console.print("error: " + "\n  ".join(lines))


def print_warning(message: Warning | str) -> None:
    error_console.print(f"warning: {printable(message)}")


def print_note(message: str) -> None:
    """A line on how a file was read: beside the results, so that `--json` prints one object."""
    error_console.print(printable(message))


def _message(error: Exception) -> str:
    """An error from a process that reads images brings a traceback, whose last line says what is wrong."""
    text = str(error)
    return text.strip().splitlines()[-1].partition(": ")[2] if "Original Traceback" in text else text
