"""Everything that once failed is refused or read, within the time and memory of the fuzzer's cases."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import factorpack as fp
from tests.golden.make import GOLDEN
from tests.helpers import little_memory
from tests.hostile.past_failures import CORPUS, READ, REFUSED, SOURCES
from tools.fuzz.inputs import CURVES, judged, read_source
from tools.fuzz.inputs import SOURCES as CHECKPOINTS
from tools.fuzz.loop import Outcome, Result, Target
from tools.fuzz.reader import OTHER, TARGET, Original, judge, show

FOUND = sorted(CORPUS.iterdir())


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path: Path, make: Callable[[], bytes], message: str) -> None:
    blob = make()
    assert len(blob) < 200_000
    (tmp_path / "file").write_bytes(blob)
    with little_memory(), pytest.raises(fp.FormatError) as caught:
        fp.load(tmp_path / "file").state_dict()
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def read_packed(path: Path) -> Result:
    original = Original(b"", fp.load(GOLDEN)._reader.schema, {})  # type: ignore[union-attr]
    return judge(path, original, True, random.Random(0))


def outcome_of(target: Target, work: Callable[[], Result]) -> Outcome:
    outcome = Outcome()
    outcome.run(target, "a past failure", work)
    return outcome


@pytest.mark.parametrize("make", READ.values(), ids=READ)
def test_read(tmp_path: Path, make: Callable[[], bytes]) -> None:
    (tmp_path / "file").write_bytes(make())
    outcome = outcome_of(TARGET, partial(read_packed, tmp_path / "file"))
    assert outcome.violations == []
    assert set(outcome.counts) == {OTHER}


@pytest.mark.parametrize("name", SOURCES)
def test_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(SOURCES[name]())
    assert outcome_of(CHECKPOINTS, partial(read_source, tmp_path / name)).violations == []


def read_curves(path: Path) -> Result:
    packed = fp.load(GOLDEN)
    return judged(lambda: show(packed, fp.budget.curves.load_curves(path)), path.stat().st_size)


READERS: dict[str, tuple[Target, Callable[[Path], Result]]] = {
    ".json": (CURVES, read_curves),
    ".packed": (TARGET, read_packed),
    ".pt": (CHECKPOINTS, read_source),
    ".safetensors": (CHECKPOINTS, read_source),
}


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_corpus(path: Path, tmp_path: Path) -> None:
    assert path.stat().st_size < 100_000
    target, read = READERS[path.suffix]
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    assert outcome_of(target, partial(read, copy)).violations == []
