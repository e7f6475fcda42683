"""The command line as a whole, in process through `main`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from inspect import getdoc
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file

import factorpack as fp
from factorpack import commands
from tests.commands.running import invoke, printed, run
from tests.helpers import assert_same_tensor


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["factorpack", "--version"])
    monkeypatch.delitem(
        sys.modules, "factorpack.__main__", raising=False
    )  # another test may have imported it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("factorpack", run_name="__main__")
    assert not ended.value.code
    assert fp.__version__ in capsys.readouterr().out


def test_there_and_back(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    assert run(monkeypatch, "compress", checkpoint, "-o", packed, "--set", "tile=64", "--json") == 0
    made = printed(capsys)
    assert made["file_bytes"] == packed.stat().st_size
    assert made["file_ratio"] == made["original_bytes"] / made["file_bytes"]

    assert run(monkeypatch, "inspect", packed, "--json") == 0
    seen = printed(capsys)
    assert {"file_bytes", "file_ratio", "paper_ratio", "tensors"} <= set(seen)
    assert seen["file_bytes"] == packed.stat().st_size
    assert sum(sum(line["stored_bytes"].values()) for line in seen["tensors"]) == seen["file_bytes"]

    assert run(monkeypatch, "decode", packed, "-o", back) == 0
    capsys.readouterr()
    for name, tensor in fp.load(packed).state_dict().items():
        assert_same_tensor(load_file(back)[name], tensor)

    assert run(monkeypatch, "verify", packed, "--against", checkpoint, "--json") == 0
    checked = printed(capsys)
    assert checked["ok"] is True
    errors = {line["name"]: line["relative_error"] for line in checked["tensors"]}
    original, decoded = (
        load_file(checkpoint)["conv2.weight"].double(),
        load_file(back)["conv2.weight"].double(),
    )
    assert errors["conv2.weight"] == pytest.approx(float((decoded - original).norm() / original.norm()))
    assert errors["conv1.weight"] == errors["steps"] == 0.0


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"factorpack {fp.__version__}\n"


@pytest.mark.parametrize("command", list(commands.COMMANDS))
def test_help_teaches(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert "Usage: factorpack" in capsys.readouterr().out


def test_the_overview_says_what_each_command_says() -> None:
    for name, command in commands.COMMANDS.items():
        first = (getdoc(command.load()) or "").partition("\n")[0]
        assert command.summary == first, name


def test_a_misspelt_command_is_answered_with_the_right_one() -> None:
    result = invoke("inspct", "x")
    assert result.exit_code == 2
    assert "Did you mean 'inspect'?" in " ".join(result.output.split())


def test_modules_are_modules() -> None:
    """Importing the package must not put a function in a module's place."""
    for command in commands.COMMANDS.values():
        command.load()
        assert isinstance(getattr(commands, command.module), ModuleType)


def test_sigterm_ends_a_command_as_ctrl_c_does(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was writing is cleaned up, and so are its lock and its folder."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def terminated(*_: object) -> None:
        seen.extend(path.name for path in tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

    given = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr("factorpack.format.atomic.rename", terminated)
    try:
        out = tmp_path / "out.safetensors"
        assert run(monkeypatch, "compress", checkpoint, "-o", out, "--ratio", 5) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert any(name.endswith(".lock") for name in seen)
    assert {path.name for path in tmp_path.iterdir()} == given
