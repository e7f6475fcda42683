"""Command lines: a short run of `python -m tools.fuzz --what cli`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from factorpack import commands
from tools.fuzz import cli
from tools.fuzz.loop import fuzz


def test_the_command_line_ends_well() -> None:
    outcome = fuzz(cli.TARGET, 25, 0)
    assert outcome.violations == []
    assert {"exit 0", "exit 2"} <= set(outcome.counts) <= {"exit 0", "exit 1", "exit 2"}


@pytest.mark.parametrize("does_write", [False, True])
def test_the_fuzzer_sees_a_traceback_and_a_file_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does_write: bool
) -> None:
    def breaks() -> None:
        if does_write:
            Path("../outside").write_text("")
        raise KeyError(tmp_path)

    monkeypatch.setattr(commands, "main", breaks)
    (violation,) = fuzz(cli.TARGET, 1, 0).violations
    assert ("wrote outside its folder" if does_write else "KeyError") in violation


def test_case_i_of_a_seed_is_always_the_same() -> None:
    files = ["net.safetensors"]
    cases = [[cli.arguments(random.Random(f"{seed}:3"), files) for _ in "ab"] for seed in (1, 2)]
    assert cases[0][0] == cases[0][1] != cases[1][0]


def test_every_command_gets_what_it_takes() -> None:
    assert set(cli.PARAMETERS) == set(commands.COMMANDS)
    for name, parameters in cli.PARAMETERS.items():
        assert any("--json" in parameter.flags for parameter in parameters), name
    assert "--ratio" in {flag for each in cli.PARAMETERS["plan"] for flag in each.flags}
    assert sys.argv[0] != "factorpack"
