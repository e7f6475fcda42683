"""`factorpack verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factorpack.commands.console import console, print_json, print_line
from factorpack.commands.options import DecodedBytes, Json, PackedFile
from factorpack.packed import load
from factorpack.report.differences import TensorCheck
from factorpack.report.differences import verify as verify_packed
from factorpack.report.text import plain

REPORTED = ("name", "relative_error", "largest_error", "problem")


def verify(
    file: PackedFile,
    against: Annotated[
        Path | None, typer.Option(help="The checkpoint it was made from: report the error of each tensor.")
    ] = None,
    max_bytes: DecodedBytes = None,
    as_json: Json = False,
) -> None:
    """Check a packed file, and compare it with the original checkpoint.

    Every checksum is checked and every tensor decoded. The exit code is 1 where a tensor is missing, has
    another shape, or was kept raw and yet differs.

    Example:

        factorpack verify resnet18.packed.safetensors --against resnet18.safetensors
    """
    checks = list(verify_packed(load(file, max_bytes), against))
    problems = [check for check in checks if check.problem]
    if as_json:
        rows = [{key: getattr(check, key) for key in REPORTED} for check in checks]
        print_json({"ok": not problems, "tensors": rows})
    else:
        for check in checks if against else problems:
            _print_check(check)
        print_line(f"{file}: {len(checks)} tensors, every checksum correct, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


def _print_check(check: TensorCheck) -> None:
    outcome = plain(check.problem, "red") if check.problem else plain(f"{check.relative_error:.4f}")
    console.print(plain(f"{check.name}  ") + outcome, soft_wrap=True)
