"""`import factorpack` is quiet and light."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("matplotlib", "triton", "transformers", "sklearn", "typer", "rich", "onnx", "onnxscript")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )


def test_nothing_heavy_is_loaded_and_nothing_is_printed() -> None:
    done = run(
        f"import sys, factorpack; assert not set({HEAVY}) & set(sys.modules), set({HEAVY}) & set(sys.modules)"
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_neither_does_using_it_where_no_one_watches() -> None:
    done = run(
        "import sys, torch, factorpack as fp; fp.compress(torch.nn.Linear(8, 8), fp.Scalar(4)).state_dict();"
        f"assert not set({HEAVY}) & set(sys.modules)"
    )
    assert (done.stdout, done.stderr) == ("", "")
