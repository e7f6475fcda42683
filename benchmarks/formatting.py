"""What every table is made of: a stored result, the line that says where it comes from, and markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {"resnet18": "ResNet18", "mobilenet_v2": "MobileNetV2"}


def is_stored(study: str, case: str) -> bool:
    return (RESULTS / study / f"{case}.json").exists()


def load_result(study: str, case: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / study / f"{case}.json").read_text())
    return document


def format_source(*documents: dict[str, Any]) -> str:
    """The command and the machine of each result, to go under a table."""
    lines = ""
    for document in documents:
        facts = document["machine"]
        where = facts["gpu"] if "gpu" in facts else f"{facts['cpu']}, {facts['cores']} cores"
        lines += f"`{document['command']}` on {where}, torch {facts['torch']}.\n"
    return lines


def format_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def format_settings(method: dict[str, Any]) -> str:
    """A method's fields in words: its name, then its settings."""
    return ", ".join(
        [method["method"], *(f"{key} {value}" for key, value in method.items() if key != "method")]
    )


def describe_schedule(schedule: dict[str, Any]) -> str:
    """Training settings in words, in their order."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in schedule.items())


def qspca_cells(method: dict[str, Any]) -> list[str]:
    return [str(method["rank"]), str(method["latent_bits"]), f"{method['sparsity']:.0%}"]
