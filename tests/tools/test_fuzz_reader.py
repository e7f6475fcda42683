"""Damaged and forged files: a short run of `python -m tools.fuzz --what reader`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import factorpack as fp
from factorpack.format import container, trellis_stream
from factorpack.format.entropy import decode as decode_codes
from tests.format.reference import ans_decode, path_decode
from tests.golden.make import GOLDEN
from tools.fuzz import reader
from tools.fuzz.loop import Target, fuzz
from tools.fuzz.reader import KINDS, OTHER, REFUSED, SAME, TARGET, Original, damaged, judge, originals
from tools.fuzz.streams import codes_stream, path_stream

FILES = 200


@pytest.fixture
def valid() -> list[Original]:
    return originals()


def test_damaged_files_are_refused_or_read_as_they_were():
    outcome = fuzz(TARGET, FILES, seed=0)
    assert outcome.violations == []
    assert outcome.counts.total() == FILES
    results = {key.partition(": ")[2] for key in outcome.counts}
    assert {REFUSED, SAME, OTHER} <= results <= {REFUSED, SAME, OTHER, "read, then FormatError"}


def test_file_i_of_a_seed_is_always_the_same():
    once, again = fuzz(TARGET, 15, seed=3, start=10), fuzz(TARGET, 15, seed=3, start=10)
    assert once.counts == again.counts != fuzz(TARGET, 15, seed=4, start=10).counts


class AnyNumber(int):
    """A checksum that is equal to every other."""

    def __new__(cls, *_: object) -> AnyNumber:
        return int.__new__(cls, 0)

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = int.__hash__


def test_the_fuzzer_sees_a_reader_without_checksums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, valid: list[Original]
):
    """It is no use if it cannot fail."""
    monkeypatch.setattr(container.zlib, "crc32", AnyNumber)

    def flipped() -> None:
        for seed in range(100):
            (tmp_path / "file").write_bytes(damaged("flip bits", valid[0].blob, random.Random(seed)))
            judge(tmp_path / "file", valid[0], False, random.Random(seed))

    with pytest.raises(AssertionError, match="was read as another model"):
        flipped()


@pytest.fixture
def golden(tmp_path: Path) -> fp.Packed:
    (tmp_path / "file").write_bytes(GOLDEN.read_bytes())
    return fp.load(tmp_path / "file")


@pytest.mark.parametrize("way", ["saved again", "decoded to a file"])
def test_the_fuzzer_sees_a_way_that_gives_others(
    monkeypatch: pytest.MonkeyPatch, golden: fp.Packed, way: str
):
    weights = golden.state_dict()
    bits = reader._bits(weights)
    if way == "saved again":
        bits["fc.weight"] = b""
    else:
        monkeypatch.setattr(reader, "load_file", lambda _: {"fc.weight": torch.ones(1)})
    with pytest.raises(AssertionError, match=f"{way}, it is another model"):
        reader.use(golden, weights, bits)


def test_the_fuzzer_sees_other_codes_than_the_reference(golden: fp.Packed):
    assert golden.path is not None
    blob, weights = golden.path.read_bytes(), golden.state_dict()
    reader.compare(blob, golden, weights)
    for name in ("conv.weight", "sums.weight", "path.weight", "ternary", "spatial.weight"):
        with pytest.raises(AssertionError, match="not those of the formula"):
            reader.compare(blob, golden, weights | {name: weights[name] * 1.01})
    other = dict(golden) | {"up.weight": golden["conv.weight"]}
    with pytest.raises(AssertionError, match="the reference reads another codebook"):
        reader.compare(blob, fp.Packed(other), weights)


def _stuck(_: random.Random) -> reader.Result:
    while True:
        pass


def _greedy(_: random.Random) -> reader.Result:
    bytearray(b"1" * (80 << 20))
    return "read", 1000


def test_the_fuzzer_sees_time_and_memory():
    slow = fuzz(Target(lambda _: _stuck, seconds=0.002), 2, seed=0)
    assert all("TimeoutError" in line for line in slow.violations[::2])
    assert "more than its size allows" in fuzz(Target(lambda _: _greedy), 1, seed=0).violations[0]


def test_an_undamaged_file_is_the_same(tmp_path: Path, valid: list[Original]):
    for original in valid:
        (tmp_path / "file").write_bytes(original.blob)
        assert judge(tmp_path / "file", original, False, random.Random(0))[0] == SAME


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_damage_does_some(valid: list[Original], kind: str):
    for original in (valid[0], valid[5]):
        results = {damaged(kind, original.blob, random.Random(seed)) for seed in range(10)}
        assert len(results - {original.blob}) >= 5


@pytest.mark.parametrize("seed", range(8))
def test_streams_of_another_writer_are_read(seed: int):
    rng = random.Random(seed)
    rows, columns = rng.choice([(1, 1), (3, 20), (20, 6), (70, 2)])
    low, states = rng.choice((-2, -200)), rng.choice((4, 8))
    codes = codes_stream(rng, rows, columns, low, rng.choice((-1, 7, 255)))
    assert decode_codes(codes, rows, columns).tolist() == ans_decode(codes, rows, columns)
    path = path_stream(rng, rows, columns, states, rng.choice((0, 3, 100)))
    assert trellis_stream.decode(path, rows, columns, states).tolist() == path_decode(
        path, rows, columns, states
    )
