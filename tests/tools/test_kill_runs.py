"""A short run of `python -m tools.kill_runs`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.forking import run_forked

ROOT = Path(__file__).parents[2]
COMMANDS = ["compress --ratio --calibration", "finetune"]  # test_grid has comparisons that go on


def test_killed_commands_go_on_to_the_same_files(tmp_path: Path) -> None:
    some = ["--kills", "4", "--in-a-row", "2", "--commands", *COMMANDS]
    command = [sys.executable, "-m", "tools.kill_runs", *some, "--results", str(tmp_path)]
    done = run_forked(command, cwd=ROOT, timeout=200)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    for name, count in document["result"].items():
        assert count["kills"] >= 1, name
        assert count["violations"] == [], name
    assert done.returncode == 0
