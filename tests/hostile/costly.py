"""Small files that would cost a reader much, under checksums that are right."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from factorpack.format import frequency_tables as tables
from tests.tampered import Pieces, container_of, envelope_of

Row = dict[str, Any]


def file_of(rows: dict[str, tuple[Row, bytes]], aliases: dict[str, str] | None = None) -> bytes:
    """A file of these rows, with names and checksums added, and their streams."""
    document = {
        "tensors": [{"name": name} | row for name, (row, _) in rows.items()],
        "aliases": aliases or {},
    }
    pieces = Pieces(document, {name: stream for name, (_, stream) in rows.items()})
    pieces.sign()
    return pieces.build()


def filled(row: Row, stream: bytes, elements: int) -> tuple[Row, bytes]:
    """With as much filler as the expansion rule requests for an array of so many elements."""
    filler = max(0, -(-elements // 1024) - len(stream))
    return row | {"filler_bytes": filler}, stream + bytes(filler)


def constant(shape: list[int]) -> tuple[Row, bytes]:
    row = {"kind": "constant", "dtype": "float32", "shape": shape}
    return filled(row | {"parts": {"value": ["raw", "float32", [1], 4]}}, bytes(4), int(np.prod(shape)))


def ans_of(code: int) -> bytes:
    """An entropy-coded stream of one code: one class, one symbol, no message."""
    return struct.pack("<BbBBB", 8, code, 0, 0, 0)


def path_zeros(segment: int) -> bytes:
    """A path of one class without a message: every column quiet, every index 0."""
    even = [np.array([[256]]), np.array([[255, 1]])]
    header = struct.pack("<BbBBBH", 8, 0, 0, 0, 0, segment)
    return header + tables.write_tables(even, np.array([[256]] * 2), 8)


def path(rows: int, columns: int, segment: int) -> tuple[Row, bytes]:
    """A scalar tensor whose codes are a path."""
    stream = path_zeros(segment)
    parts = {"codes": ["trellis", 4, [rows, columns], len(stream)], "scale": ["raw", "float16", [1, 1], 2]}
    row = {"kind": "scalar", "dtype": "float32", "shape": [rows, columns], "parts": parts, "trellis": 8}
    return filled(row, stream + bytes(2), rows * columns)


def factors(tile: int, rank: int, count: int) -> tuple[Row, bytes]:
    """A product of two factors of zeros."""
    zeros, one = ans_of(0), bytes(2)
    parts = {
        "codebook": ["ans", 4, [tile, rank], len(zeros)],
        "codebook_scale": ["raw", "float16", [1, 1], 2],
        "latent": ["ans", 4, [rank, count], len(zeros)],
        "latent_scale": ["raw", "float16", [1, 1], 2],
    }
    row = {"kind": "factors", "dtype": "float32", "shape": [count, tile], "parts": parts}
    return filled(row, zeros + one + zeros + one, max(tile * rank, rank * count, tile * count))


def empty() -> tuple[Row, bytes]:
    row = {"kind": "keep", "dtype": "int8", "shape": [0]}
    return row | {"parts": {"values": ["raw", "int8", [0], 0]}}, b""


def schema_of(row: bytes, repeated: bytes = b"", count: int = 0) -> bytes:
    """A file whose rows are this text, without a stream."""
    return container_of(envelope_of(b'{"tensors":[' + row + repeated * count + b'],"aliases":{}}'), {})


def codewords(stages: int, tile: int, count: int) -> tuple[Row, bytes]:
    """Sums of one codeword of zeros per stage."""
    zeros, book = ans_of(-2), bytes(2 * stages * tile)
    parts = {
        "codebook": ["raw", "float16", [stages, tile], len(book)],
        "indices": ["ans", 2, [stages, count], len(zeros)],
    }
    row = {"kind": "codewords", "dtype": "float32", "shape": [count, tile], "parts": parts}
    return filled(row, book + zeros, max(stages * count, tile * count))
