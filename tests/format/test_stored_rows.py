"""Rows that are cut from a schema's text: the same as those of a JSON parser, in little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from factorpack.errors import FormatError
from factorpack.format import schema, stored_rows
from factorpack.format.container import Reader
from factorpack.record import Encoded
from tests.golden.make import GOLDEN
from tests.helpers import assert_same_encoded, write_packed
from tests.hostile import costly
from tests.tampered import envelope_of

ROW = {"name": "a", "kind": "keep", "dtype": "int8", "shape": [0]} | {
    "parts": {"values": ["raw", "int8", [0], 0]},
    "crc": 0,
}


def row(name: str, **fields: Any) -> str:
    return json.dumps(ROW | {"name": name} | fields, ensure_ascii=False, separators=(",", ":"))


def parsed(text: str, file_bytes: int = 0) -> schema.Schema:
    return schema.parse(envelope_of(text.encode()), file_bytes)


@pytest.fixture
def none_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "KEPT_BYTES", 0)


def test_a_row_that_is_not_kept_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Reader(GOLDEN)
    monkeypatch.setattr(stored_rows, "KEPT_BYTES", 0)
    found = Reader(GOLDEN)
    assert len(kept.rows._kept) == len(kept) > len(found.rows._kept) == 0
    assert found.schema == kept.schema
    assert list(found) == list(kept)
    for name in kept:
        assert_same_encoded(found[name], kept[name])


@pytest.mark.parametrize("indent", [0, 3])
@pytest.mark.parametrize("keys", [("tensors", "aliases"), ("aliases", "tensors")])
def test_any_layout_of_the_text_is_read(indent: int, keys: tuple[str, str]) -> None:
    document = {
        "tensors": [ROW | {"name": each} for each in ('a"]},{[', "\\", "é\n")],
        "aliases": {"[{": "\\"},
    }
    found = parsed(json.dumps({key: document[key] for key in keys}, indent=indent))
    assert list(found.tensors) == ['a"]},{[', "\\", "é\n"]
    assert found.aliases == {"[{": "\\"}


A, B = row("a"), row("b")
WRONG = {
    "no comma": f'{{"tensors":[{A}{B}],"aliases":{{}}}}',
    "two commas": f'{{"tensors":[{A},,{B}],"aliases":{{}}}}',
    "a comma behind": f'{{"tensors":[{A},],"aliases":{{}}}}',
    "a comma before": f'{{"tensors":[,{A}],"aliases":{{}}}}',
    "a number before": f'{{"tensors":[1,{A}],"aliases":{{}}}}',
    "a number between": f'{{"tensors":[{A},1,{B}],"aliases":{{}}}}',
    "a number alone": '{"tensors":[1],"aliases":{}}',
    "a row by a name": f'{{"tensors":{{"a":{A}}},"aliases":{{}}}}',
    "a row among the aliases": f'{{"tensors":[],"aliases":{{"b":{A}}}}}',
    "rows in two places": f'{{"tensors":[{A}],"aliases":{{"b":{B}}}}}',
    "rows in two lists": f'{{"tensors":[{A}],"aliases":[{B}]}}',
    "a row for each": f'{{"tensors":[{A}],"tensors":[{B}],"aliases":{{}}}}',
    "another bracket": f'{{"tensors":[{A[:-1]}]],"aliases":{{}}}}',
    "a number behind": f'{{"tensors":[{A}1],"aliases":{{}}}}',
    "a row behind an alias": f'{{"tensors":[],"aliases":{{"c":"a"{A}}}}}',
    "rows and an alias of none": f'{{"tensors":[],"aliases":{{"c":{A}"a"}}}}',
    "a row behind all": f'{{"tensors":[],"aliases":{{}}}}[[{A}]]',
    "no end of the first": f'{{"tensors":[{A[:-1]}',
    "no end": f'{{"tensors":[{A},{B[:-1]}',
    "another end": f'{{"tensors":[{A}}},"aliases":{{}}}}',
    "more behind": f'{{"tensors":[{A}],"aliases":{{}}}}]',
    "closed before": f'}}{{"tensors":[{A}],"aliases":{{}}}}',
    "the same name": f'{{"tensors":[{A},{A}],"aliases":{{}}}}',
    "a backslash outside": f'{{"tensors":[{A}\\,{B}],"aliases":{{}}}}',
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parsed(text)


@pytest.mark.usefixtures("none_kept")
def test_names_of_any_length_are_found() -> None:
    names = ["a" * 256, "a" * 257, "é" * 300, "\U0001f600"]
    found = parsed('{"tensors":[' + ",".join(map(row, names)) + '],"aliases":{}}').tensors
    assert list(found) == names
    assert [found[name].name for name in names] == names
    for absent in ("a", "a" * 258, "\udcff", ""):
        assert absent not in found
        with pytest.raises(KeyError):
            found[absent]
    assert 1 not in found
    with pytest.raises(FormatError, match="appears twice"):
        parsed('{"tensors":[' + ",".join(map(row, [*names, "é" * 300])) + '],"aliases":{}}')


def test_a_row_is_not_longer_than_a_reader_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "MAX_ROW_BYTES", len(A))
    assert list(parsed(f'{{"tensors":[{A}],"aliases":{{}}}}').tensors) == ["a"]
    with pytest.raises(FormatError, match=f"a tensor row of {len(A) + 1} bytes, allowed are {len(A)}"):
        parsed(f'{{"tensors":[{row("aa")}],"aliases":{{}}}}')
    empty = Encoded("keep", (0,), torch.int8, {"values": torch.zeros(0, dtype=torch.int8)})
    with pytest.raises(FormatError, match=r"a row of .* its name or note is long"):
        write_packed(tmp_path / "file", {"a" * (1 << 20): empty})


class TestMemory:
    @pytest.mark.parametrize("item", [b"{}", b"[[]]", b'{"name":"a"}'])
    def test_no_row_is_parsed_behind_one_that_is_refused(
        self, item: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts: list[int] = []
        parse = stored_rows.parse_counted

        def counted(text: bytearray) -> object:
            texts.append(len(text))
            return parse(text)

        monkeypatch.setattr(stored_rows, "parse_counted", counted)
        with pytest.raises(FormatError, match="the tensor row holds"):
            parsed('{"tensors":[' + (item + b",").decode() * 3000 + item.decode() + '],"aliases":{}}')
        assert texts == [len('{"tensors":[],"aliases":{}}'), len(item)]

    @pytest.mark.parametrize("item", ["1.5", '"a"', "12345678901", "null"])
    def test_values_beside_the_rows_are_counted_before_they_are_parsed(self, item: str) -> None:
        text = '{"tensors":[' + f"{item}," * 70_000 + f'{item}],"aliases":{{}}}}'
        with pytest.raises(
            FormatError, match="the schema has 70001 values beside its rows, allowed are 65536"
        ):
            parsed(text)
        with pytest.raises(FormatError, match="the tensor row holds"):
            parsed(text, file_bytes=16 * (70_001 - 65_536))

    @pytest.mark.usefixtures("none_kept")
    def test_a_row_takes_its_text_and_little_more(self) -> None:
        """Its objects would take a kilobyte, and 4 times the file allow for 176 bytes beside 64 MiB."""
        count, text = 600, '{"tensors":[' + ",".join(row(f"{i:x}") for i in range(600)) + '],"aliases":{}}'
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            found = parsed(text)
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert len(found.tensors) == count
        assert taken < 1.2 * len(text) + 250 * count

    def test_a_header_is_counted_before_safetensors_parses_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[Callable[..., Any]] = []
        monkeypatch.setattr(
            "factorpack.format.safetensors_file.safe_open", lambda *_, **__: calls.append(print)
        )
        header = b"{" + b",".join(b'"%x":{}' % i for i in range(100_000)) + b"}"
        (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(
            FormatError, match=r"not a complete safetensors file of packed tensors: .* values or more"
        ):
            Reader(tmp_path / "file")
        assert not calls

    def test_a_name_beyond_ascii_widens_no_other_text(self, tmp_path: Path) -> None:
        values = Encoded("keep", (20_000,), torch.int8, {"values": torch.ones(20_000, dtype=torch.int8)})
        write_packed(tmp_path / "file", {"\U0001f600": values, "é": values})
        found = Reader(tmp_path / "file")
        assert list(found) == ["\U0001f600", "é"]
        assert list(found._file.entries) == ["\U0001f600", "é"]
        wide = max(map(ord, found._file._header(found._file.first - 8)))
        assert wide < 1 << 16


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    blob = costly.file_of({"a": costly.constant([1]), "b": costly.constant([2]), "c": costly.constant([3])})
    (tmp_path / "file").write_bytes(blob[:-5] + b"\1" + blob[-4:])
    with pytest.raises(FormatError, match="tensor 'b': the checksum does not match"):
        Reader(tmp_path / "file")
