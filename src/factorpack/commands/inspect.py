"""`factorpack inspect`."""

from __future__ import annotations

from factorpack.commands.console import print_json, print_line, print_table
from factorpack.commands.options import DecodedBytes, Json, PackedFile, Top
from factorpack.packed import load
from factorpack.report.text import size_json, size_summary, size_table


def inspect(file: PackedFile, top: Top = None, max_bytes: DecodedBytes = None, as_json: Json = False) -> None:
    """Show where every byte of a packed file went, tensor by tensor.

    Example:

        factorpack inspect resnet18.packed.safetensors --top 10
    """
    report = load(file, max_bytes).size()
    if as_json:
        print_json(size_json(report))
        return
    print_table(size_table(report, top))
    print_line("")
    print_line(f"{file}: {size_summary(report)}")
    print_line(f"by the paper's formula, with fixed-width codes: {report.paper_ratio:.2f} times", style="dim")
