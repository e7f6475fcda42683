"""What people try before they read anything: each ends in a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from tests.commands.running import run
from tests.helpers import seeded

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
    return {
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


def test_a_file_that_grew_is_called_larger(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "compress", files["INTS"], "-o", "s.safetensors") == 0
    assert "times larger" in capsys.readouterr().out


@pytest.mark.parametrize("ratio", [1.1, 4.0])
def test_weights_that_are_all_zero_fit_any_budget(ratio: float) -> None:
    packed = fp.compress({"a.weight": torch.zeros(64, 64)}, ratio=ratio, progress=False)
    assert not packed.state_dict()["a.weight"].any()
