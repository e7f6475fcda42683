"""`factorpack verify`."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from typing import Annotated

import typer

from factorpack.commands.console import print_cell, print_json, print_line
from factorpack.commands.options import DecodedBytes, Json, Key, PackedFile
from factorpack.errors import FormatError, PlanError
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
    key: Key = None,
    sha256: Annotated[
        str | None, typer.Option(metavar="HEX", help="The SHA-256 that the whole file must have.")
    ] = None,
    max_bytes: DecodedBytes = None,
    as_json: Json = False,
) -> None:
    """Check a packed file, and compare it with the original checkpoint.

    Every checksum is checked and every tensor decoded. The exit code is 1 where a tensor is missing, has
    another shape, or was kept raw and yet differs. The file's own checksums find damage; `--sha256`, with a
    value from someone you trust, also finds a file that another has made. `--json` prints the file's SHA-256.

    Example:

        factorpack verify resnet18.packed.safetensors --against resnet18.safetensors
    """
    found = check_sha256(file, sha256) if sha256 is not None or as_json else ""
    checks = list(verify_packed(load(file, max_bytes), against, key=key))
    problems = [check for check in checks if check.problem]
    if as_json:
        rows = [{key: getattr(check, key) for key in REPORTED} for check in checks]
        print_json({"ok": not problems, "sha256": found, "tensors": rows})
    else:
        for check in checks if against else problems:
            _print_check(check)
        whole = ", its SHA-256 as given" if sha256 is not None else ""
        print_line(f"{file}: {len(checks)} tensors, every checksum correct{whole}, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


def check_sha256(file: Path, expected: str | None) -> str:
    """The SHA-256 of a file, before any of it is read as anything else; FormatError where it is another."""
    if expected is not None and not re.fullmatch("[0-9a-fA-F]{64}", expected):
        raise PlanError(f"--sha256 is {expected!r}, expected 64 hexadecimal digits")
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise FormatError(f"{file} cannot be read: {error.strerror}") from error
    if expected is not None and not hmac.compare_digest(found, expected.lower()):
        raise FormatError(f"{file} has the SHA-256 {found}, expected {expected.lower()}: it is another file")
    return found


def _print_check(check: TensorCheck) -> None:
    outcome = plain(check.problem, "red") if check.problem else plain(f"{check.relative_error:.4f}")
    print_cell(plain(f"{check.name}  ") + outcome)
