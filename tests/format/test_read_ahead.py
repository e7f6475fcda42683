from __future__ import annotations

import threading
from pathlib import Path

import pytest

from factorpack.errors import FormatError
from factorpack.format import read_ahead as ahead
from factorpack.format.container import Reader
from factorpack.format.read_ahead import read_ahead
from tests.golden.make import CHUNKED, GOLDEN
from tests.helpers import assert_same_encoded
from tests.tampered import take_apart


@pytest.mark.parametrize("large", [0, 100, 1 << 22])
@pytest.mark.parametrize("threads", [1, 2, 5, 100])
def test_the_items_of_a_reader_in_their_order(threads: int, large: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ahead, "LARGE_BYTES", large)
    reader = Reader(GOLDEN)
    found = list(read_ahead(reader, threads))
    assert [name for name, _ in found] == list(reader)
    for name, encoded in found:
        assert_same_encoded(encoded, reader[name])


def test_as_many_are_read_ahead_as_there_are_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ahead, "LARGE_BYTES", 0)
    reader = Reader(GOLDEN)
    started, waiting = [], threading.Semaphore(0)
    read = Reader.__getitem__

    def noted(self: Reader, name: str) -> object:
        started.append((name, threading.current_thread().name))
        waiting.release()
        return read(self, name)

    monkeypatch.setattr(Reader, "__getitem__", noted)
    items = read_ahead(reader, 3)
    next(items)
    for _ in range(4):  # the one that was asked for, and three more
        assert waiting.acquire(timeout=30)
    assert {name for name, _ in started} == set(list(reader)[:4])
    assert threading.current_thread().name not in {thread for _, thread in started}
    items.close()
    assert len(started) == 4


def test_a_damaged_stream_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ahead, "LARGE_BYTES", 100)
    pieces = take_apart(GOLDEN.read_bytes())
    pieces.set_part(CHUNKED, "codes", pieces.part(CHUNKED, "codes")[:-1])
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    with pytest.raises(FormatError, match=f"tensor '{CHUNKED}': part 'codes'"):
        list(read_ahead(Reader(tmp_path / "file"), 2))
