"""A folder whose run was ended late is found finished, or needs no second compression."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

import factorpack as fp
from factorpack.calibration.model_folder import PACKED_FILE, open_folder
from factorpack.hub import resumed_folder
from factorpack.hub.resumed_folder import identify_run, resume_folder
from tests.helpers import flipped, seeded


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({"a.weight": seeded(16, 16)}, folder / "model.safetensors")
    return folder


class Run:
    """A run that can be ended at some point; it counts how often the packed file was made."""

    def __init__(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.target, self.patch, self.made = source, source.parent / "small", monkeypatch, 0

    def write(self, path: Path) -> None:
        self.made += 1
        fp.compress(self.source, fp.Scalar(4), to=path, progress=False)

    def go(self) -> bytes:
        like = open_folder(self.source)
        packed = resume_folder(self.target, like, self.write, lambda: identify_run(like, "settings"))
        assert packed.path == self.target / PACKED_FILE
        return packed.path.read_bytes()

    def end_at(self, place: str) -> None:
        def ends(*_: object) -> None:
            raise KeyboardInterrupt

        with self.patch.context() as patched:
            patched.setattr(place, ends)
            with pytest.raises(KeyboardInterrupt):
                self.go()

    def left(self) -> set[str]:
        return {path.name for path in self.source.parent.iterdir()} - {"model"}


@pytest.fixture
def run(source: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(source, monkeypatch)


AFTER_RENAME, BEFORE_RENAME = "factorpack.hub.resumed_folder.load", "factorpack.hub.save.card"


def test_a_run_ended_after_its_last_rename_had_finished(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *_, **__: None)  # killed before anything is removed
        run.end_at(AFTER_RENAME)
    assert {"small", "small.packed.safetensors", ".small.finished"} <= run.left()
    before = (run.target / PACKED_FILE).stat().st_ino
    assert run.go() == (run.target / PACKED_FILE).read_bytes()
    assert run.made == 1
    assert (run.target / PACKED_FILE).stat().st_ino == before
    assert run.left() == {"small"}


def test_a_run_ended_before_it_does_not_compress_again(run: Run) -> None:
    run.end_at(BEFORE_RENAME)
    assert run.left() == {"small.packed.safetensors", ".small.finished"}
    run.go()
    assert run.made == 1
    assert run.left() == {"small"}


def _weights(run: Run) -> None:
    content = (run.source / "model.safetensors").read_bytes()
    (run.source / "model.safetensors").write_bytes(flipped(content, 8 * len(content) - 1))


def _config(run: Run) -> None:
    (run.source / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "x": 1}')


@pytest.mark.parametrize("change", [_weights, _config])
def test_what_was_made_from_another_model_is_made_again(change: Callable[[Run], None], run: Run) -> None:
    run.end_at(BEFORE_RENAME)
    change(run)
    run.go()
    assert run.made == 2


@pytest.mark.parametrize("harmed", ["small.packed.safetensors", ".small.finished"])
def test_what_is_damaged_is_made_again(harmed: str, run: Run) -> None:
    run.end_at(BEFORE_RENAME)
    file = run.target.parent / harmed
    content = file.read_bytes()
    file.write_bytes(flipped(content, 8 * len(content) - 12))
    with pytest.warns(UserWarning, match="is damaged, so small.packed.safetensors is made again"):
        run.go()
    assert run.made == 2


def test_another_folder_of_that_name_is_refused_before_the_model_is_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.go()
    monkeypatch.setattr(resumed_folder, "checksum_of", None)
    with pytest.raises(FileExistsError, match="already exists"):
        run.go()
    assert run.made == 1
