"""`factorpack plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from tests.commands.running import run
from tests.helpers import seeded


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights larger than a sample, whose rows are of unequal size, and what is kept beside them."""
    scale = torch.linspace(0.5, 2, 512)[:, None]
    state = {
        "conv1.weight": seeded(16, 3, 3, 3),
        "conv2.weight": seeded(128, 128, 3, 3, seed=1),
        "wide.weight": scale * seeded(512, 384, seed=2),
        "fc.weight": seeded(40, 512, seed=3),
        "fc.bias": seeded(40),
        "steps": torch.tensor(7),
    }
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "net.safetensors")
    return tmp_path / "in" / "net.safetensors"


def test_a_plan_writes_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(checkpoint.parent)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for choices in (
        (),
        ("--ratio", 9),
        ("--method", "scalar"),
        ("--max-bytes", 120_000, "--exclude", "fc.*"),
    ):
        assert run(monkeypatch, "plan", checkpoint, *choices) == 0
        assert "times smaller" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_command_says_what_the_verb_does(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", checkpoint, "--method", "scalar", "--bits", 5, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file_bytes"] == fp.plan(checkpoint, fp.Scalar(5)).file_bytes
    assert sum(line["bytes"] for line in said["tensors"]) + said["header_bytes"] == said["file_bytes"]
    assert sum(line["share"] for line in said["tensors"]) < 1
    assert run(monkeypatch, "plan", checkpoint, "--ratio", 10, "--top", 2) == 0
    out = capsys.readouterr().out
    assert "the smallest possible" in out
    assert "planner: Planner(" in out
    assert run(monkeypatch, "plan", checkpoint, "--ratio", 10, "--bits", 3) == 2
    assert "a budget chooses methods" in capsys.readouterr().err
    assert run(monkeypatch, "plan", checkpoint, "--ratio", 100_000) == 2
    assert "with every weight zero" in capsys.readouterr().err
