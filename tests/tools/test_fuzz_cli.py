"""A short run of `python -m tools.fuzz_cli`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from factorpack import commands as cli
from tools import fuzz_cli


def test_the_command_line_ends_well() -> None:
    outcome = fuzz_cli.fuzz(25, 0)
    assert outcome.violations == []
    assert {"exit 0", "exit 2"} <= set(outcome.counts) <= {"exit 0", "exit 1", "exit 2"}


def test_the_fuzzer_sees_a_traceback_and_a_file_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks() -> None:
        Path("../outside").write_text("")
        raise KeyError(tmp_path)

    monkeypatch.setattr(cli, "main", breaks)
    violations = fuzz_cli.fuzz(1, 0).violations
    assert "KeyError" in violations[0]
    assert "wrote outside its folder" in violations[1]


def test_case_i_of_a_seed_is_always_the_same() -> None:
    files = ["net.safetensors"]
    cases = [
        [fuzz_cli.arguments(fuzz_cli.random.Random(f"{seed}:3"), files) for _ in "ab"] for seed in (1, 2)
    ]
    assert cases[0][0] == cases[0][1] != cases[1][0]


def test_every_command_gets_what_it_takes() -> None:
    assert set(fuzz_cli.PARAMETERS) == set(cli.COMMANDS)
    for name, parameters in fuzz_cli.PARAMETERS.items():
        assert any("--json" in parameter.flags for parameter in parameters), name
    assert "--ratio" in {flag for each in fuzz_cli.PARAMETERS["plan"] for flag in each.flags}
    assert sys.argv[0] != "factorpack"
