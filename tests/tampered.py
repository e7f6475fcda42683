"""Packed files taken apart, tampered with and put together again; for the tests and the fuzzer."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from factorpack.format.container import METADATA_KEY, SMALL_BYTES, safetensors_header
from factorpack.format.schema import SMALL, VERSION


@dataclass(slots=True)
class Pieces:
    """A packed file in pieces that can be tampered with: the schema's JSON, and each tensor's stream."""

    document: dict[str, Any]
    streams: dict[str, bytes]

    def row(self, name: str) -> dict[str, Any]:
        return next(row for row in self.document["tensors"] if row["name"] == name)

    def part(self, name: str, part: str) -> bytes:
        start = 0
        for other, (_, _, _, size) in self.row(name)["parts"].items():
            if other == part:
                return self.streams[name][start : start + size]
            start += size
        raise KeyError(part)

    def set_part(self, name: str, part: str, data: bytes) -> None:
        """Replaces a part's bytes, and their number in the schema."""
        pieces = {other: self.part(name, other) for other in self.row(name)["parts"]} | {part: data}
        end = sum(size for *_, size in self.row(name)["parts"].values())
        self.streams[name] = b"".join([*pieces.values(), self.streams[name][end:]])
        self.row(name)["parts"][part][3] = len(data)

    def sign(self) -> None:
        """Makes every checksum of the schema right."""
        for row in self.document["tensors"]:
            row["crc"] = zlib.crc32(self.streams[row["name"]])

    def build(self) -> bytes:
        return container_of(envelope_of(compact(self.document)), self.entries())

    def entries(self) -> dict[str, bytes]:
        """The container's entries: the large streams, then the small ones in one."""
        large = {name: stream for name, stream in self.streams.items() if len(stream) >= SMALL_BYTES}
        small = b"".join(stream for name, stream in self.streams.items() if name not in large)
        return {**large, SMALL: small} if small else large


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


def envelope_of(schema_json: bytes, **changes: object) -> str:
    """The metadata for a schema, with its checksum right; `changes` set fields to anything."""
    packed = zlib.compress(schema_json, 9)
    fields = {"version": VERSION, "crc": zlib.crc32(packed), "schema": base64.b64encode(packed).decode()}
    return compact(fields | changes).decode()


def container_of(metadata: str | dict[str, str], entries: Mapping[str, bytes]) -> bytes:
    table = metadata if isinstance(metadata, dict) else {METADATA_KEY: metadata}
    sizes = [(name, "U8", (len(data),), len(data)) for name, data in entries.items()]
    return safetensors_header(sizes, table) + b"".join(entries.values())


def take_apart(blob: bytes) -> Pieces:
    """The inverse of `Pieces.build`."""
    header_end = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:header_end])
    envelope = json.loads(header["__metadata__"][METADATA_KEY])
    document = json.loads(zlib.decompress(base64.b64decode(envelope["schema"])))
    shared = header.get(SMALL, {"data_offsets": [0, 0]})["data_offsets"][0]
    streams = {}
    for row in document["tensors"]:
        size = sum(part[3] for part in row["parts"].values()) + row.get("filler_bytes", 0)
        start = header[row["name"]]["data_offsets"][0] if size >= SMALL_BYTES else shared
        shared += size if size < SMALL_BYTES else 0
        streams[row["name"]] = blob[header_end + start : header_end + start + size]
    return Pieces(document, streams)
