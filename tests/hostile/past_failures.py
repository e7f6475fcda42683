"""Files that once cost a reader much, or made it fail: generators, each smaller than its file.

Files that no generator is smaller than are in `corpus/`: curves (.json), checkpoints (.pt, .safetensors) and packed
files (.packed), one for each failure.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors

from tests.golden.make import CHUNKED, GOLDEN
from tests.hostile import costly
from tests.tampered import take_apart

CORPUS = Path(__file__).with_name("corpus")
MEGABYTE = 1 << 20
ALIASES = {f"a{i}": "w" for i in range(250)}


def scalar_factors() -> bytes:
    """Saving it again was an IndexError."""
    row, stream = costly.factors(1, 1, 1)
    return costly.file_of({"w": (row | {"shape": []}, stream)})


def chunks_of_another_version() -> bytes:
    pieces = take_apart(GOLDEN.read_bytes())
    data = pieces.part(CHUNKED, "codes")
    lengths = [
        int.from_bytes(data[at : at + 4], "little") for at in range(13, 13 + 4 * data[5].bit_count(), 4)
    ]
    at = len(data) - sum(lengths) - 2
    assert data[at : at + 2] == bytes([4, 1])
    pieces.set_part(CHUNKED, "codes", data[:at] + bytes([4, 0]) + data[at + 2 :])
    pieces.sign()
    return pieces.build()


def torch_file(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def null_metadata() -> bytes:
    header = b'{"__metadata__":null}   '
    return len(header).to_bytes(8, "little") + header


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "null metadata": (null_metadata, "its metadata holds"),
    "aliases of a large tensor": (
        lambda: costly.file_of({"w": costly.constant([1024, 1000])}, ALIASES),
        "250 aliases add 256000000 elements, allowed are ",
    ),
    "aliases of a small tensor": (
        lambda: costly.file_of({"w": costly.constant([1])}, {f"{i}": "w" for i in range(2000)}),
        "2000 aliases add 32768000 elements",
    ),
    "empty tables": (lambda: costly.schema_of(b"{}", b",{}", 11_000_000), " values or more, allowed are "),
    "tables of one key": (
        lambda: costly.schema_of(b"0", b',{"a":1}', 200_000),
        " values or more, allowed are",
    ),
    "short texts": (lambda: costly.schema_of(b"0", b',""', 400_000), " values or more, allowed are "),
    "nested lists": (lambda: costly.schema_of(b"0", b",[[[[[[[]]]]]]]", 2_000_000), "nested 9 deep or more"),
    "empty tensors": (
        lambda: costly.schema_of(
            b"0", b',{"name":"","kind":"keep","dtype":"int8","shape":[0],"parts":{},"crc":0}', 300_000
        ),
        " values or more, allowed are ",
    ),
    "one long text": (lambda: costly.schema_of(b'"' + b"a" * 2 * MEGABYTE + b'"'), "longer than 1"),
    "a long product": (
        lambda: costly.file_of({"w": costly.factors(10_000, 10_000, 10_000)}),
        "tensor 'w': takes 1000000000000 multiplications in 97657 bytes, allowed are 262144 per byte",
    ),
    "a product of some more": (
        lambda: costly.file_of({"w": costly.factors(300, 300, 300)}),
        "takes 27000000 multiplications in 88 bytes",
    ),
    "narrow paths": (
        lambda: costly.file_of({f"{i}": costly.path(1024, 1, 1024) for i in range(620)}),
        "a path of 1024 steps in 9 bytes",
    ),
    "chunks of another version": (chunks_of_another_version, "the chunks have another version: [4, 0]"),
    "long sums": (
        lambda: costly.file_of({"w": costly.codewords(stages=100, tile=500, count=10_000)}),
        "takes 32000000000 multiplications",
    ),
}
"""Packed files that are refused, and what the error says."""
READ: dict[str, Callable[[], bytes]] = {
    "factors without a shape": scalar_factors,
    "a wide path": lambda: costly.file_of({"w": costly.path(1, MEGABYTE, 16)}),
    "as many aliases as there may be": lambda: costly.file_of(
        {"w": costly.constant([1])}, {f"a{i}": "w" for i in range(64)}
    ),
    "names for a terminal": lambda: costly.file_of({"\x1b]0;X\x07\x1b[2J\n[/bold]": costly.constant([1])}),
}
"""Packed files that are read, within their time and memory."""
SOURCES: dict[str, Callable[[], bytes]] = {
    "one value many times.pt": lambda: torch_file({"w": torch.ones(1).expand(1 << 29)}),
    "a long number for a name.safetensors": lambda: to_safetensors({"9" * 5000: torch.ones(2, 2)}),
    "unsigned.safetensors": lambda: to_safetensors({"w": torch.ones(2, dtype=torch.uint16)}),
    "a terminal.safetensors": lambda: to_safetensors({"\x1b[2J": torch.ones(2, 2)}),
}
"""Checkpoints, by file name."""
