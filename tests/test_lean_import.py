"""`import factorpack` is quiet and light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("matplotlib", "triton", "transformers", "sklearn", "typer", "rich", "onnx", "onnxscript")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )


def test_neither_importing_nor_using_it_loads_anything_heavy_or_prints() -> None:
    """Used where no one watches."""
    done = run(f"""
import sys, factorpack as fp
assert not set({HEAVY}) & set(sys.modules), set({HEAVY}) & set(sys.modules)
import torch
fp.compress(torch.nn.Linear(8, 8), fp.Scalar(4)).state_dict()
assert not set({HEAVY}) & set(sys.modules), set({HEAVY}) & set(sys.modules)
""")
    assert (done.stdout, done.stderr) == ("", "")
