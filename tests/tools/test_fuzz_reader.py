"""A short run of `python -m tools.fuzz_reader`."""

from __future__ import annotations

from pathlib import Path

import pytest

from factorpack.format import container
from tools import fuzz_reader
from tools.fuzz_reader import KINDS, OTHER, REFUSED, SAME, damaged, fuzz, judge, originals

FILES = 1500


def test_damaged_files_are_refused_or_read_as_they_were():
    outcome = fuzz(FILES, seed=0)
    assert outcome.violations == []
    assert set(outcome.total()) <= {REFUSED, SAME, OTHER}
    assert outcome.total().total() == FILES
    assert all(outcome.counts[kind][REFUSED] for kind in KINDS)


def test_file_i_of_a_seed_is_always_the_same():
    once, again = fuzz(40, seed=3, start=10), fuzz(40, seed=3, start=10)
    assert once.counts == again.counts
    assert once.counts != fuzz(40, seed=4, start=10).counts


def test_the_fuzzer_sees_a_reader_without_checksums(monkeypatch: pytest.MonkeyPatch):
    """It is no use if it cannot fail."""
    monkeypatch.setattr(container.zlib, "crc32", AnyNumber)
    violations = fuzz(300, seed=0).violations
    assert any("was read as another model" in line for line in violations)


class AnyNumber(int):
    """A checksum that is equal to every other."""

    def __new__(cls, *_: object) -> AnyNumber:
        return int.__new__(cls, 0)

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = int.__hash__


def test_the_fuzzer_sees_a_file_that_takes_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fuzz_reader, "_read", _stuck)
    monkeypatch.setattr(fuzz_reader, "FILE_SECONDS", 0.01)
    monkeypatch.setattr(fuzz_reader, "originals", lambda folder: [originals_once(folder)])
    assert all("TimeoutError" in line for line in fuzz(3, seed=0).violations)


def originals_once(_: Path) -> fuzz_reader.Original:
    return fuzz_reader.Original(fuzz_reader.GOLDEN.read_bytes(), fuzz_reader.Schema((), {}), {})


def _stuck(_: Path) -> None:
    while True:
        pass


def test_an_undamaged_file_is_the_same(tmp_path: Path):
    for original in originals(tmp_path):
        (tmp_path / "file").write_bytes(original.blob)
        assert judge(tmp_path / "file", original, forged=False) == SAME


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_damage_does_some(tmp_path: Path, kind: str):
    for original in originals(tmp_path):
        results = {damaged(kind, original.blob, fuzz_reader.random.Random(seed)) for seed in range(10)}
        assert len(results - {original.blob}) >= 5
