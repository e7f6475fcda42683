"""`factorpack verify`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import factorpack as fp
from factorpack.commands import verify as command
from tests.commands.running import failure, ok, run
from tests.golden.make import GOLDEN


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


class TestSha256:
    given = hashlib.sha256(GOLDEN.read_bytes()).hexdigest()

    def test_the_one_it_has(self) -> None:
        assert "every checksum correct, its SHA-256 as given, 0 problems" in ok(
            "verify", GOLDEN, "--sha256", self.given.upper()
        )
        assert json.loads(ok("verify", GOLDEN, "--json"))["sha256"] == self.given

    def test_another(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that another has made opens, as its checksums are right; nothing of it is parsed."""
        fp.save(fp.load(GOLDEN), tmp_path / "other")
        monkeypatch.setattr(command, "load", None)
        message = failure("verify", tmp_path / "other", "--sha256", self.given)
        assert f"expected {self.given}: it is another file" in message

    @pytest.mark.parametrize("given", ["", "abc", "0" * 63, "0" * 65, "g" * 64])
    def test_no_sha256(self, given: str) -> None:
        assert "expected 64 hexadecimal digits" in failure("verify", GOLDEN, "--sha256", given)

    def test_no_file(self, tmp_path: Path) -> None:
        assert "cannot be read: No such file" in failure(
            "verify", tmp_path / "absent", "--sha256", self.given
        )
