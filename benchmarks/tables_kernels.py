"""The tables of Linear layers on a GPU: microseconds on packed codes, beside cuBLAS and torch's int4 kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import markdown, result, source


def dense() -> str:
    """A line for each layer and each kernel that there is without factorpack."""
    document = result("kernels", "h200")
    batches = document["settings"]["batches"]
    lines = []
    for shape in document["settings"]["layers"]:
        rows = [row for row in document["result"]["dense"] if row["shape"] == shape]
        for title, field in (("cuBLAS, BF16", "bf16_us"), ("torch's int4", "int4_us")):
            lines.append([_name(shape), title, *(_microseconds(row[field]) for row in rows)])
    return markdown(["layer", "kernel", *(f"batch {batch}, us" for batch in batches)], lines)


def packed() -> str:
    """A line for each layer, way to pack it and width; and how near the first batch is to copying the codes."""
    document = result("kernels", "h200")
    settings, outcome = document["settings"], document["result"]
    lines = []
    for shape in settings["layers"]:
        for share in (*settings["shares"], None):
            for bits in settings["bits"]:
                case = (shape, share, bits)
                rows = [row for row in outcome["packed"] if (row["shape"], row["share"], row["bits"]) == case]
                ways = "codes" if share is None else f"factors, k/d = {share:g}"
                lines.append([_name(shape), ways, str(bits), *map(_cell, rows), _of_copies(rows[0])])
    head = ["layer", "packed as", "bits", *(f"batch {batch}, us" for batch in settings["batches"])]
    head.append(f"of copy bandwidth, batch {settings['batches'][0]}")
    checks = outcome["checks"]
    note = (
        f"In parentheses how many times faster than BF16 and than int4. {checks['count']} products were checked "
        f"against FP64, {len(checks['failed'])} of them were wrong; copies moved "
        f"{outcome['copy_bytes_per_s'] / 1e12:.2f} TB/s, read and written.\n"
    )
    return f"{markdown(head, lines)}\n{note}{source(document)}"


def _name(shape: list[int]) -> str:
    return f"{shape[0]} x {shape[1]}"


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _cell(row: dict[str, Any]) -> str:
    if "error" in row:
        return "-"
    int4 = "-" if row["faster_than_int4"] is None else f"{row['faster_than_int4']:.1f}"
    return f"{row['us']:.1f} ({row['faster_than_bf16']:.1f}, {int4})"


def _of_copies(row: dict[str, Any]) -> str:
    return "-" if "error" in row else f"{row['share_of_copy_bandwidth']:.0%}"


KERNELS: dict[str, Callable[[], str]] = {"kernels-dense": dense, "kernels": packed}
