"""`factorpack inspect`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from tests.commands.running import run
from tests.helpers import seeded


def test_a_name_cannot_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fp.save(fp.compress({"\x1b[31m[red]w": torch.ones(3)}, progress=False), tmp_path / "x.safetensors")
    assert run(monkeypatch, "inspect", tmp_path / "x.safetensors") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]w" in out


def test_brackets_in_a_path_are_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every line that a command prints about a file."""
    folder = tmp_path / "[bold]a" / ("long" * 40)
    folder.mkdir(parents=True)
    source, file, back = folder / "net.safetensors", folder / "small.safetensors", folder / "back.safetensors"
    save_file({"a.weight": seeded(16, 32)}, source)
    commands = (
        (file, "compress", source, "-o", file, "--method", "scalar"),
        (file, "inspect", file),
        (back, "decode", file, "-o", back),
        (file, "verify", file),
    )
    for named, *words in commands:
        assert run(monkeypatch, *words) == 0
        assert f"{named}: " in capsys.readouterr().out


@pytest.mark.parametrize("words", [("inspect",), ("verify",), ("decode", "-o", "back.safetensors")])
def test_a_file_that_decodes_to_too_much_is_refused(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    fp.save(fp.compress({"w": torch.ones(30)}, progress=False), "x.safetensors")
    assert run(monkeypatch, *words, "x.safetensors", "--max-bytes", "119") == 2
    assert "declares 120 decoded bytes, allowed are 119" in " ".join(capsys.readouterr().err.split())
    assert run(monkeypatch, *words, "x.safetensors", "--max-bytes", "120") == 0
