"""Tables for people and dictionaries for programs, from the same reports."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from factorpack.printable import printable
from factorpack.size import SizeReport


def plain(text: str, style: str = "") -> Text:
    """Text from a file as a cell of a table, where a string would be read as markup."""
    return Text(printable(text), style)


def human_bytes(count: float) -> str:
    """Bytes in decimal units, as for disks and networks.

    >>> human_bytes(2_447_117)
    '2.45 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def size_table(report: SizeReport, top: int | None = None) -> Table:
    """One line per tensor; with `top`, only the largest ones, largest first."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("tensor", "shape", "encoding"):
        table.add_column(heading, overflow="fold")
    for heading in ("bytes", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", style="dim", overflow="fold")
    lines = list(report.tensors)
    if top is not None:
        lines = sorted(lines, key=lambda line: -line.bytes)[:top]
    for line in lines:
        shape = "x".join(map(str, line.shape)) or "-"
        ratio = f"{line.original_bytes / line.bytes:.1f}" if line.bytes else "-"
        table.add_row(plain(line.name), shape, line.words, f"{line.bytes:,}", ratio, plain(line.note))
    return table


def size_summary(report: SizeReport) -> str:
    """How much smaller a file is than its checkpoint, in one line."""
    assert report.file_bytes is not None
    text = f"{human_bytes(report.source_bytes)} -> {human_bytes(report.file_bytes)}, {_times(report)}"
    if report.source_bytes != report.original_bytes:
        own = report.source_bytes / report.file_bytes
        text += f" than FP32 ({own:.2f} times than the checkpoint's own types)"
    return text


def _times(report: SizeReport) -> str:
    assert report.file_ratio is not None
    if report.file_ratio >= 1 or not report.file_ratio:
        return f"{report.file_ratio:.2f} times smaller"
    return f"{1 / report.file_ratio:.2f} times larger"


def size_json(report: SizeReport) -> dict[str, Any]:
    """The output of `inspect --json`."""
    return {
        "file_bytes": report.file_bytes,
        "file_ratio": report.file_ratio,
        "paper_ratio": report.paper_ratio,
        "original_bytes": report.original_bytes,
        "source_bytes": report.source_bytes,
        "tensors": [
            {
                "name": line.name,
                "kind": line.kind,
                "shape": list(line.shape),
                "encoding": line.words,
                "note": line.note,
                "original_bytes": line.original_bytes,
                "stored_bytes": dict(line.stored_bytes) if line.stored_bytes else None,
                "fixed_bits": dict(line.fixed_bits),
            }
            for line in report.tensors
        ],
    }
