"""The command line as a person meets it: in process through `main`, and once as an installed program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import factorpack as fp
from factorpack import commands as cli
from tests.helpers import assert_same_tensor, seeded


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {
        "conv1.weight": seeded(8, 3, 3, 3),
        "conv2.weight": seeded(64, 32, 3, 3),
        "fc.weight": seeded(10, 64),
        "fc.bias": seeded(10),
        "steps": torch.tensor(7),
    }
    save_file(state, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `factorpack ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["factorpack", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_there_and_back(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    assert run(monkeypatch, "compress", checkpoint, "-o", packed, "--tile", 64, "--json") == 0
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


@pytest.mark.parametrize("change", ["kept", "shape", "missing", "extra", "other weights"])
def test_verify_sees_another_checkpoint(
    change: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packed, other = tmp_path / "small.safetensors", tmp_path / "other.safetensors"
    fp.save(fp.compress(checkpoint, progress=False), packed)
    state = load_file(checkpoint)
    if change == "kept":
        state["fc.bias"][3] += 1e-6
    elif change == "shape":
        state["fc.weight"] = state["fc.weight"].T.contiguous()
    elif change == "missing":
        del state["conv2.weight"]
    elif change == "extra":
        state["more"] = torch.ones(2)
    else:
        state["conv2.weight"] = -state["conv2.weight"]
    save_file(state, other)
    assert run(monkeypatch, "verify", packed, "--against", other) == 1
    assert "1 problems" in capsys.readouterr().out


def test_settings_of_another_method_are_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("compress", checkpoint, "-o", tmp_path / "x.safetensors")
    assert run(monkeypatch, *arguments, "--method", "scalar", "--rank", 3) == 2
    assert "unknown setting 'rank' for method 'scalar', known are bits, clip" in capsys.readouterr().err
    assert run(monkeypatch, *arguments, "--rank", 300) == 2
    assert "rank 300 outside 1..256" in capsys.readouterr().err
    assert run(monkeypatch, *arguments, "--exclude", "layer9.*") == 2
    assert "'layer9.*' matches no tensor" in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists()


def test_a_recipe_and_its_errors(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, packed = tmp_path / "r.toml", tmp_path / "small.safetensors"
    recipe.write_text(
        'exclude = ["fc.*"]\n[default]\nmethod = "scalar"\nbits = 3\n[layers."conv2*"]\nmethod = "keep"\n'
    )
    assert run(monkeypatch, "compress", checkpoint, "-o", packed, "--recipe", recipe) == 0
    kinds = {name: encoded.kind for name, encoded in fp.load(packed).items()}
    assert kinds == {
        "conv1.weight": "scalar",
        "conv2.weight": "keep",
        "fc.bias": "keep",
        "fc.weight": "keep",
        "steps": "keep",
    }
    assert run(monkeypatch, "compress", checkpoint, "-o", packed, "--recipe", recipe, "--rank", 3) == 2
    for text, words in [
        ("[defualt]\n", "unknown key 'defualt', known are default, layers, exclude, finetune"),
        ('[default]\nmethod = "scalar"\nbit = 3\n', "unknown setting 'bit'"),
        ("default = 3\n", "'default' is 3, expected a table"),
        ("x = [", "cannot be read"),
    ]:
        recipe.write_text(text)
        capsys.readouterr()
        assert run(monkeypatch, "compress", checkpoint, "-o", packed, "--recipe", recipe) == 2
        assert words in capsys.readouterr().err


def test_a_name_cannot_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fp.save(fp.compress({"\x1b[31m[red]w": torch.ones(3)}, progress=False), tmp_path / "x.safetensors")
    assert run(monkeypatch, "inspect", tmp_path / "x.safetensors") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]w" in out


def test_the_source_is_never_overwritten(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = checkpoint.read_bytes()
    assert run(monkeypatch, "compress", checkpoint, "-o", checkpoint) == 2
    assert "is read by this command" in capsys.readouterr().err
    assert checkpoint.read_bytes() == before


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"factorpack {fp.__version__}\n"


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_teaches(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert "Usage: factorpack" in capsys.readouterr().out


def test_the_installed_program(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("factorpack")
    nothing = subprocess.run(
        [program, "inspect", tmp_path / "none"], capture_output=True, text=True, check=False
    )
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("error: there is no file")


@pytest.mark.usefixtures("trained_once")
def test_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo", "--json", "--folder", tmp_path) == 0
    rows = printed(capsys)["rows"]
    assert len(rows) == 7
    for row in rows[1:]:
        assert row["file_bytes"] == (tmp_path / f"digits.{row['name']}.safetensors").stat().st_size
    assert rows[0]["test_accuracy"] > 0.95
    assert rows[1]["test_accuracy"] >= rows[0]["test_accuracy"] - 0.01


def test_workers_of_their_own_make_the_same_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, spread = tmp_path / "alone.safetensors", tmp_path / "spread.safetensors"
    assert run(monkeypatch, "compress", checkpoint, "-o", alone, "--tile", 64) == 0
    options = ["--engine", "local", "--workers", 1]
    assert run(monkeypatch, "compress", checkpoint, "-o", spread, "--tile", 64, *options) == 0
    assert spread.read_bytes() == alone.read_bytes()
    capsys.readouterr()
    assert run(monkeypatch, "compress", checkpoint, "-o", spread, "--engine", "dask") == 2
    assert "unknown engine 'dask', known are local, ray" in capsys.readouterr().err
