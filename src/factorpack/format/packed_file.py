"""A whole packed file: written, assembled from others, or only measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from factorpack.format.atomic import atomic_write
from factorpack.format.container import Reader, Writer, file_header, sort_for_file
from factorpack.format.encode_ahead import Streams, encode_ahead
from factorpack.format.schema import TensorRow
from factorpack.record import Encoded


def write_packed(
    path: str | Path,
    tensors: Iterable[tuple[str, Encoded]],
    aliases: Mapping[str, str],
    streams: Streams | None = None,
) -> None:
    """Writes a packed file, with tensors encoded by threads; those in `streams` are not encoded again."""
    with Writer(path) as writer:
        for row, stream in encode_ahead(_named(writer, tensors), torch.get_num_threads(), streams):
            writer.put(row, stream)
        for alias, target in aliases.items():
            writer.alias(alias, target)


def _named(writer: Writer, tensors: Iterable[tuple[str, Encoded]]) -> Iterator[tuple[str, Encoded]]:
    for name, encoded in tensors:
        writer.take_name(name)
        yield name, encoded


def assemble(path: Path, parts: Mapping[str, Path], aliases: Mapping[str, str]) -> None:
    """Writes one packed file from tensors that each have a packed file of their own.

    Streams are copied one at a time. The bytes are those that `write_packed` gives for the same tensors.
    """
    rows = [Reader(part).rows[name] for name, part in parts.items()]
    with atomic_write(path) as file:
        file.write(file_header(rows, aliases))
        for row in sort_for_file(rows):
            file.write(Reader(parts[row.name]).stream(row.name).data)


def bytes_of(rows: Sequence[TensorRow], aliases: Mapping[str, str]) -> int:
    """Size of the file that these rows and their streams would make."""
    return len(file_header(rows, aliases)) + sum(row.stored_bytes for row in rows)


def rows_of(tensors: Mapping[str, Encoded], streams: Streams | None = None) -> list[TensorRow]:
    """How these tensors would be stored. They are encoded by threads, and `streams` keeps what was made."""
    return [row for row, _ in encode_ahead(tensors.items(), torch.get_num_threads(), streams)]


def file_bytes(tensors: Mapping[str, Encoded], aliases: Mapping[str, str]) -> int:
    """Size of the file that these tensors would make. Everything is encoded, nothing is written."""
    return bytes_of(rows_of(tensors), aliases)
