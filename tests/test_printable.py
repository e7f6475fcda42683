"""Names from files on their way to a terminal: shown, never obeyed."""

from __future__ import annotations

import io

import pytest

from factorpack.printable import printable
from factorpack.progress import Progress, _Bar

HOSTILE = "\x1b]0;X\x07\x1b[2J\nok: 0 problems\r\u202e\u2066\x9b31m\x7f[/bold][red]:bomb:"
SHOWN = r"\x1b]0;X\x07\x1b[2J\nok: 0 problems\r\u202e\u2066\x9b31m\x7f[/bold][red]:bomb:"


def test_what_a_terminal_would_obey_is_shown_as_escapes() -> None:
    assert printable(HOSTILE) == SHOWN


@pytest.mark.parametrize("text", ["layer1.0.conv2.weight", "gewicht é 重み 🦙", "a\\b", "[x] | y", ""])
def test_what_a_person_can_read_stays(text: str) -> None:
    assert printable(text) == text


def test_bytes_of_a_path_that_are_no_text() -> None:
    assert printable(b"a\xff".decode(errors="surrogateescape")) == r"a\udcff"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("verb", ["show", "advance"])
def test_a_name_in_the_progress_bar(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    with Progress("working", 2) as bar:
        bar.show(HOSTILE) if verb == "show" else bar.advance(HOSTILE, 1)
        display = bar._job._display
        assert isinstance(display, _Bar)
        display._rich.refresh()
    written = terminal.getvalue()
    assert SHOWN in written
    assert not any(piece in written for piece in ("\x1b]0;", "\x07", "\x1b[2J", "\u202e", "\u2066", "\x9b"))
