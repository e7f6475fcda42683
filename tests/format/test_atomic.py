from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from factorpack.format import atomic
from factorpack.format.atomic import atomic_folder, atomic_write
from factorpack.format.locks import lock


def test_the_file_appears_whole(tmp_path: Path):
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_stands_until_the_end(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def fail_after(file: BinaryIO, error: type[BaseException]) -> None:
    file.write(b"ne")
    raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:
        fail_after(file, error)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps: list[str] = []
    for step in ("fsync", "replace"):
        real = getattr(os, step)
        monkeypatch.setattr(os, step, lambda *args, step=step, real=real: (steps.append(step), real(*args)))
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert steps == ["fsync", "replace", "fsync"], "the file, the rename, the folder"


def test_two_writers_do_not_meet(tmp_path: Path):
    path = tmp_path / "file"
    with atomic_write(path) as first:
        with atomic_write(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        first.write(b"first")
    assert path.read_bytes() == b"first"


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path):
    path = tmp_path / "file"
    (tmp_path / ".file.0badcafe.tmp").write_bytes(b"ne")
    (tmp_path / ".filed.0badcafe.tmp").write_bytes(b"of another file")
    with atomic_write(path) as file:
        file.write(b"new")
    assert {each.name for each in tmp_path.iterdir()} == {"file", ".filed.0badcafe.tmp"}


def test_without_locks_nothing_is_taken_for_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(atomic, "lock", lambda _: None)
    (tmp_path / ".file.0badcafe.tmp").write_bytes(b"ne")
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_sibling_taken_away_at_once_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As another writer does that takes it for abandoned, between its creation and its lock."""
    names = []

    def removed_first(handle: int) -> bool:
        (sibling,) = tmp_path.iterdir()
        names.append(sibling.name)
        if len(names) == 1:
            sibling.unlink()
        return bool(lock(handle))

    monkeypatch.setattr(atomic, "lock", removed_first)
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert len(set(names)) == 2


def test_a_folder_that_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path):
    left = tmp_path / ".packed.0123abcd.tmp"
    left.mkdir()
    (left / "half").write_bytes(b"x")
    with atomic_folder(tmp_path / "packed") as made:
        (made / "whole").write_bytes(b"y")
        assert not left.exists()
        with atomic_folder(tmp_path / "packed") as other:  # a writer that is at work is left alone
            (other / "whole").write_bytes(b"z")
            assert made.is_dir()
        (tmp_path / "packed" / "whole").unlink()
    assert [each.name for each in tmp_path.iterdir()] == ["packed"]
    assert (tmp_path / "packed" / "whole").read_bytes() == b"y"


def test_a_signal_just_after_the_sibling_was_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def interrupted(*arguments: object) -> int:
        os.close(real(*arguments))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "file"):
        pass
    assert list(tmp_path.iterdir()) == []
