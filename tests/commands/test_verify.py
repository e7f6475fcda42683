"""`factorpack verify`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import factorpack as fp
from tests.commands.running import run


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
