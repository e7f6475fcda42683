"""One run at a time, and none kept out by one that is no more."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from factorpack.errors import PlanError
from factorpack.format import locks
from factorpack.format.locks import locked


def test_the_second_is_refused_and_the_next_is_not(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with locked(target):
        with pytest.raises(PlanError, match=rf"another run \(process {os.getpid()} on"), locked(target):
            pass
        with locked(tmp_path / "other"):
            pass
    with locked(target):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_killed_holder_keeps_no_one_out(tmp_path: Path) -> None:
    target = tmp_path / "out"
    child = os.fork()
    if child == 0:
        with locked(target):
            time.sleep(60)
        os._exit(1)
    while not (tmp_path / ".out.lock").exists() or not (tmp_path / ".out.lock").read_text():
        time.sleep(0.01)
    with pytest.raises(PlanError, match=f"process {child} on"), locked(target):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / ".out.lock").exists()
    with locked(target):
        pass


def test_a_lock_file_removed_by_its_last_holder_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened just before the holder removed it, locked just after."""
    target, path = tmp_path / "out", tmp_path / ".out.lock"
    real, first = locks.lock, True

    def late(handle: int) -> bool | None:
        nonlocal first
        if first:
            first = False
            path.unlink()
        return real(handle)

    monkeypatch.setattr(locks, "lock", late)
    with locked(target):
        assert path.exists(), "the file others will look at is the one that is held"
    assert not first


def test_where_there_are_no_locks_there_is_no_exclusion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "lock", lambda _: None)
    with locked(tmp_path / "out"), locked(tmp_path / "out"):
        pass
