"""What people try before they read anything: each ends in a sentence that says what to do."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from factorpack.source import open_source
from tests.commands.running import run
from tests.helpers import assert_same_tensor, seeded

TRIED = {
    "compress NET -o missing/s.safetensors --ratio 4": "there is no folder missing to write s.safetensors into",
    "compress NET -o NET --ratio 4": "is read by this command",
    "compress NET -o s --ratio 0.5": "expected a number above 1 and below 1,000,000",
    "compress NET -o s --ratio 1e9": "expected a number above 1 and below 1,000,000",
    "compress NET -o s --ratio 4 --max-bytes 9": "give one of --ratio, --max-bytes and --max-loss",
    "compress NET -o s --bits 4": "bits is a setting of scalar, second_order",
    "compress NET -o s --calibration synthetic --ratio 4": "say what makes it with --model module:callable",
    "compress EMPTY -o s --ratio 4": "it is empty",
    "compress EMPTYPT -o s --ratio 4": "it is empty",
    "compress FOLDER -o s --ratio 4": "holds none of",
    "compress TORCH -o s --ratio 4 --key foo": "has no weights under 'foo', only at its top",
    "compress SMALL -o s --ratio 4": "is already a packed file: decode it first",
    "compress INTS -o s --ratio 4": "there is no weight to compress",
    "inspect NET": "it holds plain weights, which `factorpack compress` packs",
    "inspect FOLDER": "is a folder, expected a file: the packed file in it is",
    "inspect SMALL --top 0": "--top",
    "decode SMALL -o missing/x.safetensors": "there is no folder missing",
    "export SMALL --safetensors missing/x.safetensors": "there is no folder missing",
    "report SMALL -o missing/x.html": "there is no folder missing",
    "report SMALL -o x.html --original C:\\models\\gone.pt": "there is no file or folder C:\\models\\gone.pt",
    "demo --folder NET": "a file has its name",
    "compress NET -o PIPE --ratio 4": "is a device or a pipe, expected a file to write",
    "compress NET -o - --ratio 4": "a result cannot go to standard output",
    "compress NET -o s.pt --ratio 4": "what is written is a safetensors file: name it s.safetensors",
    "decode SMALL -o back.pth": "what is written is a safetensors file: name it back.safetensors",
    "export SMALL --safetensors back.bin": "name it back.safetensors",
    "compress https://host/net.safetensors -o s --ratio 4": "nothing is downloaded",
    "compress SEVERAL -o s --ratio 4": "name one of its files: a.safetensors, b.npz",
    "compress NOTES -o s --ratio 4": "ends in '.txt' and does not begin as a checkpoint does",
    "compress FP8 -o s --ratio 4": "of other types (float8_e4m3fn)",
    "compress JIT -o s --ratio 4": "is a TorchScript archive",
    "inspect TORCH": "it is a torch file or another archive, and `factorpack compress` packs checkpoints",
    "compress NET -o s --ratio 4 --model nets:build --calibration NOTES": "is a file, expected a folder of images",
    "compress NET -o s --ratio 4 --model nets:other --calibration synthetic": "the model lacks ['a.weight'], the",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    state = {"a.weight": seeded(32, 32)}
    save_file(state, "net.safetensors")
    save_file({"steps": torch.arange(100)}, "ints.safetensors")
    torch.save(state, "net.pt")
    Path("empty.safetensors").touch()
    Path("empty.pt").touch()
    Path("folder").mkdir()
    fp.compress(state, fp.Scalar(4), to="folder/model.packed.safetensors", progress=False)
    os.mkfifo("pipe")
    Path("several").mkdir()
    save_file(state, "several/a.safetensors")
    np.savez("several/b.npz", a=np.ones(4))
    Path("notes.txt").write_text("train it longer")
    torch.save({"a.weight": seeded(32, 32).to(torch.float8_e4m3fn)}, "fp8.pt")
    with zipfile.ZipFile("net.jit", "w") as archive:
        archive.writestr("net/data.pkl", b"")
        archive.writestr("net/constants.pkl", b"")
        archive.writestr("net/code/__torch__.py", b"")
    Path("nets.py").write_text(
        "from torch import nn\nbuild = lambda: nn.ModuleDict({'a': nn.Linear(32, 32, bias=False)})\n"
        "other = lambda: nn.Linear(3, 4)\n"
    )
    return {
        "PIPE": "pipe",
        "SEVERAL": "several",
        "NOTES": "notes.txt",
        "FP8": "fp8.pt",
        "JIT": "net.jit",
        "NET": "net.safetensors",
        "TORCH": "net.pt",
        "INTS": "ints.safetensors",
        "EMPTY": "empty.safetensors",
        "EMPTYPT": "empty.pt",
        "FOLDER": "folder",
        "SMALL": "folder/model.packed.safetensors",
    }


@pytest.mark.parametrize("line", TRIED)
def test_a_mistake_is_a_sentence(
    line: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *(files.get(word, word) for word in line.split())) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert TRIED[line] in said
    assert "Traceback" not in said


def test_the_story_of_a_compression(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(monkeypatch, "compress", files["NET"], "-o", "s 1.safetensors", "--ratio", 2, "--threads", 1) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "net.safetensors: 1,024 parameters in 1 tensor, 4.1 kB"
    assert lines[1] == "into 2.05 kB, from the weights alone, on 1 core; about 1 s"
    assert lines[2].startswith("s 1.safetensors: 4.1 kB -> ")
    assert lines[3] == "next: factorpack verify 's 1.safetensors' --against net.safetensors"
    assert run(monkeypatch, "verify", "s 1.safetensors", "--against", files["NET"]) == 0


@pytest.mark.parametrize("ending", [".PT", ".weights", ""])
def test_a_torch_file_of_any_name_is_read(ending: str, tmp_path: Path) -> None:
    state = {"a.weight": seeded(32, 32)}
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / f"net{ending}"
    )
    packed = fp.compress(tmp_path / f"net{ending}", fp.Keep(), progress=False)
    assert_same_tensor(packed.state_dict()["a.weight"], state["a.weight"])


@pytest.mark.parametrize("name", ["net.GGUF", "net.data"])
def test_other_checkpoints_of_any_name_are_read(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "made.npz", a=np.ones((4, 4)))
    (tmp_path / "made.npz").rename(tmp_path / "arrays")
    assert list(open_source(tmp_path / "arrays").entries) == ["a"]
    save_file({"a.weight": seeded(4, 4)}, tmp_path / "plain")
    assert list(open_source(tmp_path / "plain").entries) == ["a.weight"]
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(fp.SourceError, match="header"):
        open_source(tmp_path / name)


def test_a_file_that_grew_is_called_larger(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "compress", files["INTS"], "-o", "s.safetensors") == 0
    assert "times larger" in capsys.readouterr().out


@pytest.mark.parametrize("ratio", [1.1, 4.0])
def test_weights_that_are_all_zero_fit_any_budget(ratio: float) -> None:
    packed = fp.compress({"a.weight": torch.zeros(64, 64)}, ratio=ratio, progress=False)
    assert not packed.state_dict()["a.weight"].any()
