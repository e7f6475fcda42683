"""What pip is asked, without asking it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import check_wheels
from tools.check_wheels import PYTHONS, SYSTEMS, Need, find_missing, pip_command, read_needs


def test_every_dependency_of_a_user_is_asked_for() -> None:
    found = {(need.requirement.split(">")[0], need.extra) for need in read_needs()}
    assert {("torch", ""), ("rich", ""), ("onnx", "onnx"), ("gguf", "gguf")} <= found
    assert not {extra for _, extra in found} & {"docs", "bench", "dev"}


def test_pip_installs_nothing_and_takes_wheels_alone() -> None:
    command = pip_command("rich>=13", "Windows", "3.12", Path("nowhere"))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert {"--dry-run", "--no-deps", ":all:", "win_amd64", "3.12"} <= set(command)
    assert command[-1] == "rich>=13"


def test_what_pip_does_not_find_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        absent = "win_amd64" in command and "3.13" in command
        return subprocess.CompletedProcess(command, int(absent), "", "ERROR: a\nERROR: No matching" * absent)

    monkeypatch.setattr(check_wheels.subprocess, "run", run)
    need = Need("constriction>=0.4")
    assert list(find_missing([need], PYTHONS)) == [(need, "Windows", "3.13", "ERROR: No matching")]
    assert len(asked) == len(SYSTEMS) * len(PYTHONS)
