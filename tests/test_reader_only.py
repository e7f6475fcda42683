"""Loading, decoding and running a packed file imports no module that compresses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import factorpack as fp

COMPRESSOR = {
    "budget",
    "calibration",
    "commands",
    "comparison",
    "compression",
    "digits",
    "engine",
    "hub",
    "methods",
    "onnx",
    "passes",
    "per_tensor",
    "planning",
    "report",
    "solve",
    "source",
    "tune",
}

CODE = """
import sys
import torch
import factorpack as fp

packed = fp.load(sys.argv[1])
state = packed.state_dict()
model = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Linear(24, 10))
packed.apply(model, "packed")
assert model(torch.ones(2, 32)).shape == (2, 10)
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("factorpack.")}))
"""


def test_a_reader_imports_no_compressor(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    model = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Linear(24, 10))
    fp.save(fp.compress(model, fp.Scalar(4), progress=False), path)
    done = subprocess.run([sys.executable, "-c", CODE, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"packed", "format", "runtime"} <= imported
    assert not imported & COMPRESSOR


def test_the_list_names_modules_that_exist() -> None:
    home = Path(fp.__file__).parent
    assert all((home / name).is_dir() or (home / f"{name}.py").is_file() for name in COMPRESSOR)
