"""Text from files and paths, made safe to print: the one place where that is done."""

from __future__ import annotations


def printable(text: object) -> str:
    r"""Text on one line, with everything that could steer a terminal or fake a line shown as an escape.

    That is every character without a shape of its own: control codes, line breaks, overrides of the writing
    direction, zero-width characters, and bytes of a path that are no text.

    >>> printable("a\x1b[2J\nb\u202ec")
    'a\\x1b[2J\\nb\\u202ec'
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in str(text)
    )
