"""Facts -> one page that needs only a browser: no network, no framework, no code from the file.

Names in a packed file are whatever its writer chose. They reach the page in only two ways: escaped in the
opening sentence, and as JSON in a block that browsers do not execute, whose strings the page's own script
sets as text. The policy in the page's head allows only that script and that style, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from factorpack.format.atomic import atomic_write
from factorpack.kinds import KINDS
from factorpack.report.differences import BIN_WIDTH
from factorpack.report.facts import ITEMS, Facts, TensorFacts
from factorpack.report.text import human_bytes

SCRIPTS = ("dom", "tooltip", "treemap", "streams", "layer", "chart", "curves", "pareto", "table", "main")
MOST_TENSORS = 500
"""A page with tens of thousands of rows and tiles opens in no browser: tensors beyond this many are summed up."""
_DIGITS = 6
"""Significant digits of floats: more than anyone reads, fewer than doubles print."""


def write_page(facts: Facts, path: Path) -> int:
    """Writes the page atomically; returns its size in bytes."""
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
            for label, value, aside in key_figures(facts)
        ),
        tensors="All tensors"
        if len(facts.tensors) <= MOST_TENSORS
        else f"The {MOST_TENSORS} largest tensors",
        style=style,
        script=script,
        data=as_data(_document(facts)),
    )


def sentence(facts: Facts) -> str:
    """A one-sentence summary of the file, as HTML."""
    name = escape(facts.file).replace(".", ".<wbr>")
    return (
        f'<strong class="file">{name}</strong> holds {_count(facts.numbers)} weights in '
        f"{human_bytes(facts.file_bytes).replace(' ', '&nbsp;')}: {facts.ratio:.3g} times smaller than in FP32."
    )


def key_figures(facts: Facts) -> list[tuple[str, str, str]]:
    """Four key figures, each with its label, value and a reference to compare it with."""
    coded = sum(not KINDS[tensor.kind].is_raw for tensor in facts.tensors)
    if facts.error is not None:
        last = ("weight error", f"{facts.error:.2%}".replace("%", " %"), "relative norm, coded weights")
    else:
        last = ("tensors", f"{len(facts.tensors):,}", f"{coded:,} coded, the others kept")
    smaller = f"{facts.file_bytes:,} bytes"
    if facts.source_bytes != facts.original_bytes:
        smaller = f"{facts.source_bytes / facts.file_bytes:.3g} times smaller than the checkpoint's own types"
    return [
        ("on disk", human_bytes(facts.file_bytes), f"{human_bytes(facts.original_bytes)} in FP32"),
        ("times smaller", f"{facts.ratio:.2f}", smaller),
        ("bits per weight", f"{facts.bits:.2f}", "headers included, 32 before"),
        last,
    ]


def as_data(value: Any) -> str:
    """JSON that no browser mistakes for markup, whatever strings it holds.

    >>> as_data({"name": "</script><b>"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}'
    """
    text = json.dumps(_rounded(value), separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _document(facts: Facts) -> dict[str, Any]:
    shown = shown_tensors(facts.tensors)
    names = {tensor.name for tensor in shown}
    listed = replace(
        facts, tensors=shown, curves=tuple(curve for curve in facts.curves if curve.name in names)
    )
    return {
        **asdict(listed),
        "count": len(facts.tensors),
        "summed": sum(tensor.name not in names for tensor in facts.tensors),
        "kinds": {name: kind.title for name, kind in KINDS.items()},
        "items": ITEMS,
        "bin_width": BIN_WIDTH,
    }


def shown_tensors(tensors: Sequence[TensorFacts]) -> tuple[TensorFacts, ...]:
    """The tensors of the page: all, or those with problems and the largest, and the others summed up by kind."""
    if len(tensors) <= MOST_TENSORS:
        return tuple(tensors)
    by_weight = sorted(tensors, key=lambda tensor: (not tensor.problem, -tensor.bytes))
    rest: dict[str, list[TensorFacts]] = {}
    for tensor in by_weight[MOST_TENSORS:]:
        rest.setdefault(tensor.kind, []).append(tensor)
    listed = {id(tensor) for tensor in by_weight[:MOST_TENSORS]}
    return (*(tensor for tensor in tensors if id(tensor) in listed), *map(_sum_up, rest.values()))


def _sum_up(tensors: Sequence[TensorFacts]) -> TensorFacts:
    """One line for many tensors of a kind."""
    stored: Counter[str] = Counter()
    for tensor in tensors:
        stored.update(tensor.stored_bytes)
    numbers, problems = (
        sum(math.prod(each.shape) for each in tensors),
        sum(bool(each.problem) for each in tensors),
    )
    return TensorFacts(
        name=f"{len(tensors):,} smaller tensors ({KINDS[tensors[0].kind].title})",
        group="smaller tensors",
        kind=tensors[0].kind,
        shape=(numbers,),
        words=f"{len(tensors):,} tensors",
        note=f"the page lists {MOST_TENSORS} tensors one by one",
        original_bytes=sum(each.original_bytes for each in tensors),
        bytes=sum(each.bytes for each in tensors),
        stored_bytes=dict(stored),
        bits=8 * (stored.total() - stored["header"]) / max(numbers, 1),
        zeros=None,
        problem=f"{problems:,} of them have problems" if problems else "",
        count=len(tensors),
    )


def _rounded(value: Any) -> Any:
    """The same with rounded floats; JSON cannot represent non-finite ones, which become null."""
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
