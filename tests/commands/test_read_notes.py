"""What commands say of a file they read, and --key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.running import failure, printed, run
from tests.helpers import assert_same_tensor, seeded


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    state = {"module.fc.weight": seeded(16, 16), "module.fc.bias": seeded(16)}
    average = {name: value + 1 for name, value in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": average, "epoch": 3}, tmp_path / "net.pth.tar")
    return tmp_path / "net.pth.tar"


def test_what_was_read_is_said_once_and_beside_the_json(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    assert run(monkeypatch, "compress", trained, "-o", out, "--method", "keep", "--json") == 0
    said = capsys.readouterr()
    assert said.out.startswith("{")
    assert said.err.splitlines() == [
        "net.pth.tar: the weights under 'state_dict_ema', an average over training; others are under 'state_dict' "
        "(choose with --key, or key= in Python)",
        "net.pth.tar: only the weights under 'state_dict_ema' are used; left out: 'epoch'",
        "net.pth.tar: every name began with 'module.', which is left out",
    ]
    assert run(monkeypatch, "decode", out, "-o", back, "--json") == 0
    assert_same_tensor(load_file(back)["fc.bias"], seeded(16) + 1)


def test_a_key_chooses(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "small.safetensors"
    key = ("--key", "state_dict")
    assert run(monkeypatch, "compress", trained, "-o", out, "--method", "keep", "--json", *key) == 0
    assert "an average" not in capsys.readouterr().err
    assert run(monkeypatch, "verify", out, "--against", trained, "--json", *key) == 0
    assert printed(capsys)["ok"] is True
    assert run(monkeypatch, "verify", out, "--against", trained, "--json") == 1
    capsys.readouterr()
    assert run(monkeypatch, "plan", trained, "--json", *key) == 0
    assert [line["name"] for line in printed(capsys)["tensors"]] == ["fc.weight", "fc.bias"]
    assert "only under 'state_dict', 'state_dict_ema'" in failure("plan", trained, "--key", "model")
