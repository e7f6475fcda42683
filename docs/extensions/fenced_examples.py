"""Examples in docstrings stand bare, as doctest reads them: Markdown would take `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^ *>>> .*\n?(?:^ *(?!>>>)\S.*\n?)*)+", re.MULTILINE)
_FLAGS = re.compile(r" *# doctest: .*")


class FencedExamples(griffe.Extension):
    """Puts each run of examples into a code block, without doctest's flags."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    return f"```pycon\n{_FLAGS.sub('', found[0]).strip()}\n```\n"
