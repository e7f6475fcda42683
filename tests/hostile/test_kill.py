"""A writer killed at any moment leaves the old file or the whole new one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.forking import run_forked

ROUNDS = 15


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path):
    command = [sys.executable, "-m", "tests.hostile.killed_writer", str(tmp_path / "file"), str(ROUNDS)]
    root = Path(__file__).parents[2]
    run = run_forked(command, cwd=root, timeout=120)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert len(seen["random"]) == ROUNDS
    assert set(seen["random"]) <= {1, 2}
    assert seen["steps"] == {"write": 1, "flush": 1, "fsync": 1, "replace": 1, "replaced": 2}
