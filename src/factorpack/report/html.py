"""Facts -> one page that needs nothing but a browser: no network, no framework, no code from the file.

Names in a packed file are whatever its writer chose. They reach the page in two ways only: escaped into
the opening sentence, and as JSON in a block that browsers do not run, whose strings the page's own script
sets as text. The policy in the page's head allows that one script and that one style, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from factorpack.format.atomic import atomic_write
from factorpack.kinds import KINDS
from factorpack.report.differences import BIN_WIDTH
from factorpack.report.facts import ITEMS, Facts
from factorpack.report.text import human_bytes

SCRIPTS = ("dom", "tooltip", "treemap", "streams", "layer", "chart", "curves", "pareto", "table", "main")
_DIGITS = 6
"""Of a number that is not whole: more than anyone reads, fewer than doubles print."""


def write_page(facts: Facts, path: Path) -> int:
    """Writes the page, which appears under its name only when it is whole; returns its bytes."""
    text = page(facts).encode()
    with atomic_write(path) as file:
        file.write(text)
    return len(text)


def page(facts: Facts) -> str:
    """The report as HTML."""
    style = _template("page.css")
    script = '"use strict";\n(() => {\n' + "".join(_template(f"{name}.js") for name in SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return Template(_template("page.html")).substitute(
        policy=policy,
        title=escape(facts.file),
        sentence=sentence(facts),
        numbers="\n".join(
            f'<div class="number"><dt>{label}</dt><dd>{value}</dd><dd class="aside">{aside}</dd></div>'
            for label, value, aside in big_numbers(facts)
        ),
        style=style,
        script=script,
        data=as_data(_document(facts)),
    )


def sentence(facts: Facts) -> str:
    """What the file is, in one sentence of HTML."""
    name = escape(facts.file).replace(".", ".<wbr>")
    return (
        f'<strong class="file">{name}</strong> holds {_count(facts.numbers)} numbers in '
        f"{human_bytes(facts.file_bytes).replace(' ', '&nbsp;')}: {facts.ratio:.3g} times smaller than in FP32."
    )


def big_numbers(facts: Facts) -> list[tuple[str, str, str]]:
    """Four numbers to remember: what it is, the number, and what to hold it against."""
    coded = sum(not KINDS[tensor.kind].is_raw for tensor in facts.tensors)
    if facts.error is not None:
        last = ("weight error", f"{facts.error:.2%}".replace("%", " %"), "of the coded weights, in norm")
    else:
        last = ("tensors", f"{len(facts.tensors):,}", f"{coded:,} coded, the others kept")
    smaller = f"{facts.file_bytes:,} bytes"
    if facts.source_bytes != facts.original_bytes:
        smaller = f"{facts.source_bytes / facts.file_bytes:.3g} times than the checkpoint's own types"
    return [
        ("on disk", human_bytes(facts.file_bytes), f"{human_bytes(facts.original_bytes)} in FP32"),
        ("times smaller", f"{facts.ratio:.2f}", smaller),
        ("bits a number", f"{facts.bits:.2f}", "headers and all, 32 before"),
        last,
    ]


def as_data(value: Any) -> str:
    """JSON that no browser mistakes for markup, whatever its strings are.

    >>> as_data({"name": "</script><b>"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}'
    """
    text = json.dumps(_rounded(value), separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _document(facts: Facts) -> dict[str, Any]:
    return {
        **asdict(facts),
        "kinds": {name: kind.title for name, kind in KINDS.items()},
        "items": ITEMS,
        "bin_width": BIN_WIDTH,
    }


def _rounded(value: Any) -> Any:
    """The same with short numbers; JSON has no word for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(each) for each in value]
    return value


def _template(name: str) -> str:
    return (files("factorpack.report") / "template" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _count(number: int) -> str:
    for name, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,}"
