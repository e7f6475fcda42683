"""What a run keeps is read back as it was written, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from factorpack.errors import FormatError, SourceError
from factorpack.format.checked_file import (
    read_checked,
    read_checked_json,
    write_checked,
    write_checked_json,
)
from tests.helpers import flipped

DOCUMENT = {"fingerprint": "0f", "curves": {"a.weight": [0.1, 2]}, "name": "\N{GREEK SMALL LETTER ALPHA}\n"}
CONTENT = b"PK\x03\x04 and more\n\n"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for content in (CONTENT, b"", b"\n"):
        write_checked(tmp_path / "bytes", content)
        assert read_checked(tmp_path / "bytes") == content
    write_checked_json(tmp_path / "json", DOCUMENT)
    assert read_checked_json(tmp_path / "json") == DOCUMENT
    plain = json.loads((tmp_path / "json").read_text())
    assert len(plain.pop("checksum")) == 64
    assert plain == DOCUMENT


@pytest.mark.parametrize("kind", ["bytes", "json"])
def test_no_flipped_bit_and_no_cut_passes(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "json":
        write_checked_json(path, DOCUMENT)
    else:
        write_checked(path, CONTENT)
    whole = path.read_bytes()
    read = {"bytes": read_checked, "json": read_checked_json}[kind]
    harmed = [flipped(whole, bit) for bit in range(8 * len(whole))]
    harmed += [whole[:count] for count in range(len(whole))]
    harmed += [whole + b"\n", whole + whole]
    for content in harmed:
        path.write_bytes(content)
        with pytest.raises((FormatError, SourceError)):
            read(path)  # type: ignore[operator]


def test_a_file_of_another_kind_is_described_in_a_few_words(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\x88\x00" * 6_000_000)
    with pytest.raises(SourceError, match="it begins with") as caught:
        read_checked_json(tmp_path / "weights")
    assert len(str(caught.value)) < 300
