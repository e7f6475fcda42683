"""Writes the measured tables of README.md and docs from benchmarks/results.

python -m benchmarks.tables            rewrite the text between <!-- name: ... --> and <!-- /name -->
python -m benchmarks.tables --check    exit 1 where a table differs from the results

Each study's `TABLES` names its blocks. Every block on a page must belong to a study, and every study's
block must be on a page.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable

from benchmarks.formatting import ROOT
from benchmarks.run import STUDIES

Table = Callable[[], str]
BLOCK = re.compile(
    r"(?P<open><!-- (?P<name>[\w-]+): [^\n]*-->\n)(?P<body>.*?)(?P<close><!-- /(?P=name) -->)", re.DOTALL
)
_MARK = re.compile(r"<!-- /?(?P<name>[\w-]+)(: [^\n]*)? -->")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    tables = collect_tables()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text() for page in pages}
    check_names("\n".join(texts.values()), tables)
    stale = []
    for page, text in texts.items():
        fresh = BLOCK.sub(lambda found: found["open"] + tables[found["name"]]() + found["close"], text)
        if fresh != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(fresh)
    if stale and check:
        sys.exit(f"stale tables in {', '.join(stale)}: run python -m benchmarks.tables")


def collect_tables() -> dict[str, Table]:
    """Block name -> the function that writes it, from every study."""
    tables: dict[str, Table] = {}
    for study in dict.fromkeys(STUDIES.values()):
        own: dict[str, Table] = importlib.import_module(study).TABLES
        if twice := own.keys() & tables.keys():
            sys.exit(f"{study} names {_listed(twice)}, which another study names too")
        tables |= own
    return tables


def check_names(text: str, tables: Iterable[str]) -> None:
    """Exits where a block is not closed, a block has no study, or a study's block is on no page."""
    found = [block["name"] for block in BLOCK.finditer(text)]
    marks = Counter(mark["name"] for mark in _MARK.finditer(text))
    if broken := [name for name, count in marks.items() if count != 2 * found.count(name)]:
        sys.exit(f"blocks without their opening or closing line: {_listed(broken)}")
    if unknown := set(found) - set(tables):
        sys.exit(f"no study writes the blocks {_listed(unknown)}")
    if unused := set(tables) - set(found):
        sys.exit(f"no page has the blocks {_listed(unused)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


if __name__ == "__main__":
    main()
