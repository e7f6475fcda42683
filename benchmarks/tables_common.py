"""What every table is made of: a result, its source line, and markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def result(study: str, case: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / study / f"{case}.json").read_text())
    return document


def source(document: dict[str, Any]) -> str:
    """The command and the machine, to stand under a table."""
    facts = document["machine"]
    where = f"{facts['gpu']}" if "gpu" in facts else f"{facts['cpu']}, {facts['cores']} cores"
    return f"`{document['command']}` on {where}, torch {facts['torch']}.\n"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
