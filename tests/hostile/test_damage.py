"""Files damaged on their way: cut short, extended, or with any bit flipped. All of it is found."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import factorpack as fp
from factorpack.errors import FormatError
from factorpack.format import schema
from factorpack.format.container import METADATA_KEY, SMALL_BYTES, Reader
from factorpack.format.schema import SMALL
from factorpack.record import Encoded
from tests.golden.make import GOLDEN, tensors
from tests.helpers import assert_same_encoded, little_memory, write_packed
from tests.tampered import compact, container_of, envelope_of, take_apart

BLOB = GOLDEN.read_bytes()
COUNT = len(tensors())
HEADER_BYTES = int.from_bytes(BLOB[:8], "little")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    copy = tmp_path / "file"
    copy.write_bytes(BLOB)
    return copy


def test_the_whole_file_can_be_read(path: Path):
    assert len(Reader(path)) == COUNT


def test_every_flipped_bit_is_found(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every one of the header; behind it one of each byte, since checksums do not know bits from each other."""
    # Most flips leave the schema as it is. Parsing it is nine tenths of opening, and depends on its text alone.
    monkeypatch.setattr(schema, "parse", functools.lru_cache(1)(schema.parse))
    missed = []
    with path.open("r+b", buffering=0) as file:
        for position, byte in enumerate(BLOB):
            for bit in range(8) if position < 8 + HEADER_BYTES else [position % 8]:
                file.seek(position)
                file.write(bytes([byte ^ 1 << bit]))
                try:
                    Reader(path)
                    missed.append((position, bit))
                except FormatError:
                    pass
            file.seek(position)
            file.write(bytes([byte]))
    assert missed == []
    assert len(Reader(path)) == COUNT


def test_every_truncation_is_found(path: Path):
    missed = []
    with path.open("r+b", buffering=0) as file:
        for length in reversed(range(len(BLOB))):
            file.truncate(length)
            try:
                Reader(path)
                missed.append(length)
            except FormatError:
                pass
    assert missed == []


def header_of(blob: bytes) -> dict[str, object]:
    return json.loads(blob[8 : 8 + HEADER_BYTES])  # type: ignore[no-any-return]


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + BLOB[8 + HEADER_BYTES :]


def with_entry(**changes: object) -> bytes:
    """The golden file with fields of its one entry changed."""
    header = header_of(BLOB)
    header[SMALL] = {**header[SMALL], **changes}  # type: ignore[dict-item]
    return with_header(compact(header))


def with_metadata(metadata: dict[str, str]) -> bytes:
    return container_of(metadata, take_apart(BLOB).entries())


def with_second_entry(extra: str) -> bytes:
    return with_header(BLOB[8 : 8 + HEADER_BYTES].rstrip()[:-1] + b"," + extra.encode() + b"}")


DATA_BYTES = len(BLOB) - 8 - HEADER_BYTES
ENTRY = f'"{SMALL}":{{"dtype":"U8","shape":[{DATA_BYTES}],"data_offsets":[0,{DATA_BYTES}]}}'
METADATA = json.loads(BLOB[8 : 8 + HEADER_BYTES])["__metadata__"]

CONTAINERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "not a complete safetensors file"),
    "text": (lambda: b"hello, world", "not a complete safetensors file"),
    "garbage behind": (lambda: BLOB + b"\0", "not a complete safetensors file"),
    "the file twice": (lambda: BLOB * 2, "not a complete safetensors file"),
    "header of 2^63 bytes": (lambda: (1 << 63).to_bytes(8, "little") + BLOB[8:], "header too large"),
    "header of 4 GB": (lambda: (1 << 32).to_bytes(8, "little") + BLOB[8:], "header too large"),
    "header of 90 MB": (
        lambda: (90 << 20).to_bytes(8, "little") + BLOB[8:],
        "not a complete safetensors file",
    ),
    "header of nothing": (lambda: bytes(8) + BLOB[8:], "not a complete safetensors file"),
    "header not text": (lambda: with_header(b"\xff\xfe"), "not a complete safetensors file"),
    "header a list": (lambda: with_header(b"[]"), "not a complete safetensors file"),
    "header nested": (lambda: with_header(b'{"a":' * 100_000), "not a complete safetensors file"),
    "terabytes": (
        lambda: with_entry(shape=[1 << 40], data_offsets=[0, 1 << 40]),
        "not a complete safetensors file",
    ),
    "a shape that overflows": (lambda: with_entry(shape=[1 << 63, 4]), "not a complete safetensors file"),
    "a negative shape": (lambda: with_entry(shape=[-1]), "not a complete safetensors file"),
    "offsets backwards": (
        lambda: with_entry(data_offsets=[DATA_BYTES, 0]),
        "not a complete safetensors file",
    ),
    "a hole": (
        lambda: with_entry(shape=[DATA_BYTES - 1], data_offsets=[1, DATA_BYTES]),
        "not a complete safetensors file",
    ),
    "overlap": (
        lambda: with_second_entry('"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'),
        "not a complete safetensors file",
    ),
    "an entry twice": (lambda: with_second_entry(ENTRY), "'factorpack.small' appears twice"),
    "metadata twice": (lambda: with_second_entry('"__metadata__":{}'), "not a complete safetensors file"),
    "another type": (lambda: with_entry(dtype="I8"), "the container holds I8"),
    "an unknown type": (lambda: with_entry(dtype="U9"), "not a complete safetensors file"),
    "another shape": (lambda: with_entry(shape=[1, DATA_BYTES]), rf"holds U8 \[1, {DATA_BYTES}\]"),
    "an extra entry": (
        lambda: with_second_entry('"more":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'),
        r"disagree on the entries \['more'\]",
    ),
    "no entry": (
        lambda: container_of(METADATA, {}),
        r"disagree on the entries \['factorpack.small'\]",
    ),
    "another name": (
        lambda: container_of(METADATA, {"small": BLOB[8 + HEADER_BYTES :]}),
        r"disagree on the entries \['factorpack.small', 'small'\]",
    ),
    "no metadata": (lambda: with_metadata({}), "it holds plain weights"),
    "a plain checkpoint": (lambda: with_metadata({"format": "pt"}), "is not a packed file"),
    "more metadata": (lambda: with_metadata(METADATA | {"format": "pt"}), "is not a packed file"),
    "metadata no JSON": (lambda: with_metadata({METADATA_KEY: "{"}), "not valid JSON"),
    "version 0": (lambda: with_envelope(version=0), "file version 0, this reader knows version 1"),
    "version 2": (lambda: with_envelope(version=2), "file version 2, this reader knows version 1"),
    "version '1'": (lambda: with_envelope(version="1"), "the file version is '1', expected a whole number"),
    "version true": (lambda: with_envelope(version=True), "the file version is True"),
    "version 1.0": (lambda: with_envelope(version=1.0), "the file version is 1.0"),
    "checksum of text": (lambda: with_envelope(crc="0"), "the schema's checksum is '0'"),
    "checksum wrong": (lambda: with_envelope(crc=1), "the schema's checksum does not match"),
    "schema a number": (lambda: with_envelope(schema=1), "the schema is not text"),
    "schema not base64": (lambda: with_envelope(schema="*"), "the schema cannot be read"),
    "schema not ASCII": (lambda: with_envelope(schema="é"), "the schema cannot be read"),
    "schema not deflated": (
        lambda: with_envelope(schema="AAAA", crc=0xFF41D912),
        "the schema cannot be read",
    ),
    "envelope with more": (lambda: with_envelope(more=1), r"the envelope holds \['crc', 'more'"),
}


def with_envelope(**changes: object) -> bytes:
    pieces = take_apart(BLOB)
    return container_of(envelope_of(compact(pieces.document), **changes), pieces.entries())


@pytest.mark.parametrize(("make", "message"), CONTAINERS.values(), ids=CONTAINERS)
def test_hostile_containers(tmp_path: Path, make: Callable[[], bytes], message: str):
    (tmp_path / "file").write_bytes(make())
    with little_memory(), pytest.raises(FormatError, match=message):
        Reader(tmp_path / "file")


def test_the_tampering_itself_is_sound(tmp_path: Path):
    """What the cases above start from can be read: it is their change that cannot."""
    (tmp_path / "file").write_bytes(with_envelope())
    assert len(Reader(tmp_path / "file")) == COUNT
    (tmp_path / "file").write_bytes(with_entry())
    assert len(Reader(tmp_path / "file")) == COUNT


def test_no_file_and_no_folder(tmp_path: Path):
    with pytest.raises(FormatError, match="there is no file"):
        Reader(tmp_path / "none")
    with pytest.raises(FormatError, match="is a folder, expected a file"):
        Reader(tmp_path)


def values_of(size: int) -> Encoded:
    return Encoded("keep", (size,), torch.uint8, {"values": torch.arange(size).to(torch.uint8)})


class TestChangedWhileOpen:
    """What happens to a file after it was opened: the bytes that were checked, or an error."""

    @pytest.fixture
    def opened(self, path: Path) -> fp.Packed:
        write_packed(path, {"small": values_of(100), "large": values_of(2 * SMALL_BYTES)})
        return fp.load(path)

    @pytest.mark.parametrize("name", ["small", "large"])
    def test_overwritten(self, path: Path, opened: fp.Packed, name: str) -> None:
        reader = opened._reader
        assert reader is not None
        with path.open("r+b") as file:
            file.seek(reader._starts[reader.rows.number(name)] + 7)
            file.write(b"\xff")
        with pytest.raises(FormatError, match=f"tensor '{name}': the checksum does not match"):
            opened.state_dict()
        assert opened[{"small": "large", "large": "small"}[name]].numel

    @pytest.mark.parametrize("length", [0, 8, 5000, -1])
    def test_cut_short(self, path: Path, opened: fp.Packed, length: int) -> None:
        """A map into memory would end the process here."""
        with path.open("r+b") as file:
            file.truncate(length % path.stat().st_size)
        with pytest.raises(FormatError, match="has been cut short"):
            opened.state_dict()

    def test_replaced(self, path: Path, opened: fp.Packed) -> None:
        other = path.with_name("other")
        write_packed(other, {"small": values_of(3), "large": values_of(5)})
        other.rename(path)
        assert_same_encoded(opened["large"], values_of(2 * SMALL_BYTES))
        assert fp.load(path)["large"].shape == (5,)

    def test_nothing_is_copied_from_a_damaged_file(self, path: Path, opened: fp.Packed) -> None:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(FormatError, match="has been cut short"):
            fp.save(opened, path.with_name("copy"))
        assert not path.with_name("copy").exists()

    def test_handles_are_closed(self, path: Path) -> None:
        handle = Reader(path)._file._handle
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)
