"""`factorpack demo`, as an installed program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_installed_program_and_the_demo(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("factorpack")
    done = subprocess.run(
        [program, "demo", "--json", "--folder", tmp_path], check=True, capture_output=True, text=True
    )
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 7
    for row in rows[1:]:
        assert row["file_bytes"] == (tmp_path / f"digits.{row['name']}.safetensors").stat().st_size
    assert rows[0]["test_accuracy"] > 0.95
    assert rows[1]["test_accuracy"] >= rows[0]["test_accuracy"] - 0.01
    nothing = subprocess.run(
        [program, "inspect", tmp_path / "none"], capture_output=True, text=True, check=False
    )
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("error: there is no file")
