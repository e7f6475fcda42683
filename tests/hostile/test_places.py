"""Disks that are full, folders that cannot be written to, and runs that meet: clear errors, nothing half done."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from factorpack.engine import Engine, Local
from factorpack.errors import PlanError, SourceError
from tests.helpers import compress_to, seeded

METHOD = fp.Scalar(4)
FORK = Local(2, start="fork")
ENGINES = [None, FORK]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Codes of some 600 kB."""
    folder = tmp_path / "given"
    folder.mkdir()
    save_file({f"layer{n}.weight": seeded(256, 600, seed=n) for n in range(8)}, folder / "net.safetensors")
    return folder / "net.safetensors"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a disk of its own with some mount options; skipped where this user may not."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs a disk of its own, which only root may mount")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """No file may grow beyond `count` bytes: writes fail halfway, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def compress(out: Path, checkpoint: Path, engine: Engine | None) -> None:
    compress_to(out, checkpoint, METHOD, engine=engine, progress=False)


@pytest.mark.parametrize("engine", ENGINES, ids=["alone", "spread"])
def test_a_full_disk_says_where_and_the_run_goes_on_with_room(
    engine: Engine | None, checkpoint: Path, tmp_path: Path, disk: Callable[[str], Path]
) -> None:
    place = disk("size=500k")
    with pytest.raises(OSError, match="No space left") as caught:
        compress(place / "out", checkpoint, engine)
    assert caught.value.errno == errno.ENOSPC
    assert any(str(place / "out") in note for note in caught.value.__notes__)
    assert {path.name for path in place.iterdir()} <= {"out.parts"}
    subprocess.run(["mount", "-o", "remount,size=9m", str(place)], check=True)
    compress(place / "out", checkpoint, engine)
    compress(tmp_path / "expected", checkpoint, None)
    assert (place / "out").read_bytes() == (tmp_path / "expected").read_bytes()
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize("engine", ENGINES, ids=["alone", "spread"])
def test_a_write_that_fails_leaves_the_old_file(
    engine: Engine | None, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    with files_of_at_most(50_000), pytest.raises(OSError, match="File too large") as caught:
        compress(out, checkpoint, engine)
    assert any(str(out) in note for note in caught.value.__notes__)
    assert out.read_bytes() == b"old"
    assert not list(tmp_path.glob("*.tmp"))


def test_exports_points_and_states_fail_as_cleanly(checkpoint: Path, tmp_path: Path) -> None:
    packed = fp.compress(checkpoint, METHOD, progress=False)
    net = torch.nn.Linear(600, 256)
    back = tmp_path / "back"
    with files_of_at_most(3000):
        with pytest.raises(OSError, match="File too large") as caught:
            packed.decode_to(back, progress=False)
        with pytest.raises(OSError, match="File too large"):
            fp.compare(net, [4.0], tmp_path / "grid", methods=["scalar"], progress=False)
    assert any(str(back) in note for note in caught.value.__notes__)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"net.safetensors"}


@pytest.mark.parametrize("engine", ENGINES, ids=["alone", "spread"])
def test_a_read_only_folder_is_refused_before_any_work(
    engine: Engine | None, checkpoint: Path, disk: Callable[[str], Path]
) -> None:
    place = disk("size=9m,ro")
    with pytest.raises(SourceError, match=r"out cannot be written: the folder .*disk is read-only"):
        compress(place / "out", checkpoint, engine)


@pytest.mark.parametrize("engine", ENGINES, ids=["alone", "spread"])
def test_a_folder_of_someone_elses(
    engine: Engine | None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: permissions do not bind root, as whom tests often run."""
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(SourceError, match="is read-only for this user"):
        compress(tmp_path / "out", checkpoint, engine)


def test_a_checkpoint_that_may_not_be_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated, for the same reason."""

    def refused(path: Path, **_: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("factorpack.checkpoints.safetensors_entries.safe_open", refused)
    with pytest.raises(SourceError, match="Permission denied"):
        fp.compress(checkpoint, METHOD, progress=False)


def test_runs_that_meet_end_in_one_whole_file(checkpoint: Path, tmp_path: Path) -> None:
    """Several at the same time: each ends well or is told of another; none spoils the file."""
    out = tmp_path / "out"
    children = []
    for _ in range(5):
        child = os.fork()
        if child == 0:
            status = 9
            try:
                compress(out, checkpoint, Local(1, start="fork"))
                status = 0
            except PlanError as error:
                status = 1 if "another run" in str(error) else 9
            finally:
                os._exit(status)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert set(codes) <= {0, 1}
    assert 0 in codes
    compress(tmp_path / "expected", checkpoint, None)
    assert out.read_bytes() == (tmp_path / "expected").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"given", "out", "expected"}
