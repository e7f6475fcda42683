"""The package is typed for those who install it: mypy sees its types in a program of theirs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import factorpack

PROGRAM = """
import factorpack as fp

packed: fp.Packed = fp.compress("model.safetensors", fp.Scalar(bits=4), recipe=None)
ratio: float | None = packed.size().file_ratio
planned: int = fp.plan("model.safetensors", ratio=12).file_bytes
"""
MISTAKE = 'fp.Scalar(bits="four")\n'


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the package and nothing else: the rest takes a minute."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy")
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    shutil.copytree(Path(factorpack.__file__).parent, site / "factorpack")
    return home / "bin" / "python"


def complaints(python: Path, folder: Path, program: str) -> str:
    (folder / "program.py").write_text(program)
    options = ("--strict", "--ignore-missing-imports", "--python-executable", python, "--cache-dir=cache")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "program.py"],
        cwd=folder,
        env={
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        },  # mypy would look there
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_program_that_is_right_passes_and_one_that_is_wrong_does_not(python: Path, tmp_path: Path) -> None:
    assert complaints(python, tmp_path, PROGRAM).startswith("Success")
    assert 'has incompatible type "str"; expected "int"' in complaints(python, tmp_path, PROGRAM + MISTAKE)


def test_without_its_marker_the_types_would_be_lost(python: Path, tmp_path: Path) -> None:
    marker = next(python.parents[1].glob("lib/python*/site-packages/factorpack/py.typed"))
    marker.unlink()
    try:
        assert complaints(python, tmp_path, PROGRAM + MISTAKE).startswith("Success")
    finally:
        marker.touch()
