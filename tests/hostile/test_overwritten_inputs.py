"""No command replaces a file that it reads: not under its own name, not through a link."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

import factorpack as fp
from factorpack import commands as cli
from factorpack.engine import Local
from factorpack.errors import PlanError, SourceError
from tests.helpers import compress_to, seeded


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"a.weight": seeded(16, 32), "b.weight": seeded(8, 16)}, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder: a config, an index and two shards."""
    made = tmp_path / "hf"
    made.mkdir()
    save_file({"a.weight": seeded(16, 32)}, made / "model-1.safetensors")
    save_file({"b.weight": seeded(8, 16)}, made / "model-2.safetensors")
    shards = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (made / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (made / "tokenizer.json").write_text("{}")
    return made


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> None:
    """The command ends with our error, and names what it would have overwritten."""
    monkeypatch.setattr(sys, "argv", ["factorpack", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "is read by this command" in capsys.readouterr().err.replace("\n", " ")


def linked(path: Path, link: Callable[[Path, Path], None]) -> Path:
    other = path.with_name("other.safetensors")
    link(path, other)
    return other


NAMES: dict[str, Callable[[Path], Path]] = {
    "itself": lambda path: path,
    "way round": lambda path: path.parent / ".." / path.parent.name / path.name,
    "symbolic link": lambda path: linked(path, lambda old, new: new.symlink_to(old)),
    "hard link": lambda path: linked(path, lambda old, new: os.link(old, new)),
}
each_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
METHOD = ("--method", "scalar", "--bits", "4")


@each_name
@pytest.mark.parametrize("how", [METHOD, ("--ratio", "4"), (*METHOD, "--engine", "local")], ids=str)
def test_compress_a_file(
    how: tuple[str, ...],
    name: Callable[[Path], Path],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = checkpoint.read_bytes()
    refused(monkeypatch, capsys, "compress", checkpoint, "-o", name(checkpoint), *how)
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize(
    "target",
    [
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
    ],
)
@pytest.mark.parametrize("source", ["", "model.safetensors.index.json"], ids=["folder", "index"])
def test_compress_a_folder_or_an_index(
    source: str,
    target: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if source and target in ("config.json", "tokenizer.json"):
        pytest.skip("an index alone does not read them")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    for how in (METHOD, (*METHOD, "--engine", "local")):
        refused(monkeypatch, capsys, "compress", folder / source, "-o", folder / target, *how)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_compress_with_other_inputs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[default]\nmethod = "scalar"\nbits = 4\n')
    refused(monkeypatch, capsys, "compress", checkpoint, "-o", recipe, "--recipe", recipe)
    refused(
        monkeypatch,
        capsys,
        "compress",
        checkpoint,
        "-o",
        tmp_path / "new",
        "--ratio",
        4,
        "--curves",
        checkpoint,
    )
    curves = tmp_path / "curves.json"
    curves.write_text("{}")
    refused(monkeypatch, capsys, "compress", checkpoint, "-o", curves, "--ratio", 4, "--curves", curves)


@each_name
def test_decode(
    name: Callable[[Path], Path],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "small.safetensors"
    fp.save(fp.compress(checkpoint, fp.Scalar(4), progress=False), file)
    before, target = file.read_bytes(), name(file)
    refused(monkeypatch, capsys, "decode", file, "-o", target)
    with pytest.raises(PlanError, match="is read by this command"):
        fp.load(file).decode_to(target)
    assert file.read_bytes() == before


def test_other_commands(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.safetensors"
    fp.save(fp.compress(checkpoint, fp.Scalar(4), progress=False), file)
    refused(monkeypatch, capsys, "report", file, "-o", file, "--force")
    refused(monkeypatch, capsys, "report", file, "-o", checkpoint, "--original", checkpoint, "--force")
    net = ("--model", "torch.nn:Identity")
    for target in (file, checkpoint):
        words = ("finetune", file, *net, "--data", tmp_path / "none", "--teacher", checkpoint, "-o", target)
        refused(monkeypatch, capsys, *words)
        refused(monkeypatch, capsys, *words[:-1], tmp_path / "new", "--checkpoint", target)
    point = tmp_path / "scalar-4.packed.safetensors"
    point.write_bytes(checkpoint.read_bytes())
    refused(
        monkeypatch, capsys, "compare", point, *net, "-o", tmp_path, "--methods", "scalar", "--ratios", "4"
    )


def test_in_python(checkpoint: Path, folder: Path) -> None:
    for engine in (None, Local(1, start="fork")):
        for source, target in ((checkpoint, checkpoint), (folder, folder / "model-1.safetensors")):
            with pytest.raises(PlanError, match="is read by this command"):
                compress_to(target, source, fp.Scalar(4), engine=engine, progress=False)


@pytest.mark.parametrize("output", [".", "/"])
@pytest.mark.parametrize("command", ["compress", "finetune --model a:b --data images"])
def test_an_output_without_a_name(checkpoint: Path, command: str, output: str) -> None:
    """Was a ValueError."""
    name, *more = command.split()
    with pytest.raises(SourceError, match=rf"^[{output}] is a folder, expected a file to write"):
        cli.app([name, str(checkpoint), *more, "-o", output], standalone_mode=False)


def test_an_old_output_may_be_replaced(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    for source, target in ((checkpoint, tmp_path / "old.safetensors"), (folder, tmp_path / "b.safetensors")):
        target.write_bytes(b"old")
        assert len(compress_to(target, source, fp.Scalar(4), progress=False)) == 2
