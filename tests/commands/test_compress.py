"""`factorpack compress` with a method or a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

import factorpack as fp
from tests.commands.running import run
from tests.helpers import seeded


def test_settings_of_another_method_are_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("compress", checkpoint, "-o", tmp_path / "x.safetensors")
    assert run(monkeypatch, *arguments, "--method", "scalar", "--rank", 3) == 2
    assert "unknown setting 'rank' for method 'scalar', known are bits=8, clip=mse" in capsys.readouterr().err
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


def test_the_source_is_never_overwritten(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = checkpoint.read_bytes()
    assert run(monkeypatch, "compress", checkpoint, "-o", checkpoint) == 2
    assert "is read by this command" in capsys.readouterr().err
    assert checkpoint.read_bytes() == before


def test_workers_of_their_own_make_the_same_file(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, spread = tmp_path / "alone.safetensors", tmp_path / "spread.safetensors"
    assert run(monkeypatch, "compress", checkpoint, "-o", alone, "--set", "tile=64") == 0
    options = ["--engine", "local", "--workers", 1]
    assert run(monkeypatch, "compress", checkpoint, "-o", spread, "--set", "tile=64", *options) == 0
    assert spread.read_bytes() == alone.read_bytes()
    capsys.readouterr()
    assert run(monkeypatch, "compress", checkpoint, "-o", spread, "--engine", "dask") == 2
    assert "unknown engine 'dask', known are local, ray" in capsys.readouterr().err


RESNET = {
    "conv1.weight": (8, 3, 3, 3),
    "layer1.0.conv1.weight": (8, 8, 3, 3),
    "layer4.0.conv2.weight": (8, 8, 3, 3),
    "fc.weight": (10, 8),
}


def test_a_recipe_is_picked_said_and_overruled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, packed = tmp_path / "net.safetensors", tmp_path / "small.safetensors"
    save_file({name: seeded(*shape) for name, shape in RESNET.items()}, source)
    given = ("compress", source, "-o", packed)
    assert run(monkeypatch, *given) == 0
    assert "recipe resnet: ResNets" in capsys.readouterr().out
    assert fp.load(packed)["conv1.weight"].note.startswith("excluded by")
    assert run(monkeypatch, *given, "--json") == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "resnet"
    by_recipe = packed.read_bytes()
    assert run(monkeypatch, *given, "--recipe", "resnet") == 0
    assert packed.read_bytes() == by_recipe
    for plain in (("--recipe", "none"), ("--method", "qspca")):
        assert run(monkeypatch, *given, *plain) == 0
        assert "recipe resnet" not in capsys.readouterr().out
        fp.save(fp.compress(source, progress=False), tmp_path / "plain.safetensors")
        assert packed.read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    assert run(monkeypatch, *given, "--ratio", 3) == 0
    assert fp.load(packed)["conv1.weight"].kind == "keep"
    assert run(monkeypatch, *given, "--ratio", 3, "--recipe", "none") == 0
    assert fp.load(packed)["conv1.weight"].kind != "keep"
    assert run(monkeypatch, *given, "--recipe", "bert", "--bits", 3) == 2
    assert "a recipe states methods and settings itself" in capsys.readouterr().err
