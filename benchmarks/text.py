"""Real English sentences: the docstrings of installed packages."""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,;:'()-]+[.!?]")
"""Prose only: no code, no markup, no paths."""
FEWEST_WORDS, MOST_WORDS = 6, 40


def sentences(packages: list[str], count: int) -> list[str]:
    """Sentences from the docstrings of packages, no sentence twice, picked evenly from all there are."""
    found = list(dict.fromkeys(line for package in packages for line in _of_package(package)))
    if len(found) < count:
        raise ValueError(f"{', '.join(packages)} have {len(found)} sentences, {count} are needed")
    return [found[place * len(found) // count] for place in range(count)]


def _of_package(name: str) -> Iterator[str]:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"there is no package {name!r} here: install the bench extra")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*.py")):
            yield from _of_file(path)


def _of_file(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                for sentence in _SENTENCE.split(" ".join(paragraph.split())):
                    words = sentence.count(" ") + 1
                    if FEWEST_WORDS <= words <= MOST_WORDS and _PLAIN.fullmatch(sentence):
                        yield sentence
