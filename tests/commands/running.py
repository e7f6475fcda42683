"""How tests of commands run them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import factorpack as fp
from factorpack import commands

MODEL = "tests.tune.small_net:build"
SIDE = 14


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `factorpack ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["factorpack", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        commands.main()
    return int(exit_.value.code or 0)


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(commands.app, [str(argument) for argument in arguments])


def ok(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def failure(*arguments: object) -> str:
    """The message of the error a command ends with."""
    result = invoke(*arguments)
    assert isinstance(result.exception, fp.FactorpackError), (result.output, result.exception)
    return str(result.exception)


def reading(data: Path, model: str = MODEL) -> list[object]:
    return ["--model", model, "--data", data, "--image-size", SIDE, "--batch-size", 4, "--workers", 0]
