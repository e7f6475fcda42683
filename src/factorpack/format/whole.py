"""A packed file in one go: written, or written only to be measured."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from factorpack.format.container import Writer
from factorpack.record import Encoded


def write_packed(
    path: str | Path, tensors: Iterable[tuple[str, Encoded]], aliases: Mapping[str, str]
) -> None:
    with Writer(path) as writer:
        for name, encoded in tensors:
            writer.add(name, encoded)
        for alias, target in aliases.items():
            writer.alias(alias, target)


def file_bytes(tensors: Mapping[str, Encoded], aliases: Mapping[str, str]) -> int:
    """Of the file itself, written and measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packed.safetensors"
        write_packed(path, tensors.items(), aliases)
        return path.stat().st_size
