"""`factorpack plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import factorpack as fp
from tests.commands.running import run


def test_a_plan_writes_nothing(
    uneven_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(uneven_checkpoint.parent)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for choices in (
        (),
        ("--ratio", 9),
        ("--method", "scalar"),
        ("--max-bytes", 120_000, "--exclude", "fc.*"),
    ):
        assert run(monkeypatch, "plan", uneven_checkpoint, *choices) == 0
        assert "times smaller" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_command_says_what_the_verb_does(
    uneven_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", uneven_checkpoint, "--method", "scalar", "--bits", 5, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file_bytes"] == fp.plan(uneven_checkpoint, fp.Scalar(5)).file_bytes
    assert sum(line["bytes"] for line in said["tensors"]) + said["header_bytes"] == said["file_bytes"]
    assert sum(line["share"] for line in said["tensors"]) < 1
    assert run(monkeypatch, "plan", uneven_checkpoint, "--ratio", 10, "--top", 2) == 0
    out = capsys.readouterr().out
    assert "the smallest possible" in out
    assert "planner: Planner(" in out
    assert run(monkeypatch, "plan", uneven_checkpoint, "--ratio", 10, "--bits", 3) == 2
    assert "a budget chooses methods" in capsys.readouterr().err
    assert run(monkeypatch, "plan", uneven_checkpoint, "--ratio", 100_000) == 2
    assert "with every weight zero" in capsys.readouterr().err
