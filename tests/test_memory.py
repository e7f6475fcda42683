"""Streaming verbs hold one tensor, not the checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from factorpack.format.container import write_plain
from tests.helpers import seeded

COUNT, SIDE = 96, 512
TENSOR_BYTES = 4 * SIDE * SIDE
CHECKPOINT_BYTES = COUNT * TENSOR_BYTES

# The peak is the kernel's mark for one process alone: getrusage's also holds what its parent had at the
# start. The verb runs on a checkpoint of one tensor first, so that only holding more of them shows. Verbs
# run in children of a new interpreter: the test process's allocator has free memory of its own.
SCRIPT = """
import os, re, sys
from pathlib import Path
import torch
import factorpack as fp
from tests.helpers import compress_to

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)  # threads have arenas of their own
method = fp.QSPCA(16, 3, tile=64, clip="minmax")
verbs = {
    "compress_to": lambda at: compress_to(at / "packed.safetensors", at / "model.safetensors", method),
    "export": lambda at: fp.load(at / "packed.safetensors").decode_to(at / "back.safetensors"),
    "hold": lambda at: fp.compress(at / "model.safetensors", fp.Keep()),
}
one, many = Path(sys.argv[1]), Path(sys.argv[2])
for name, verb in verbs.items():
    child = os.fork()
    if not child:
        verb(one)
        before = peak_bytes()
        held = verb(many)
        print(name, peak_bytes() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same checkpoint with one tensor and with many."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc, which this system does not have")
    weight = seeded(SIDE, SIDE)
    made = []
    for count in (1, COUNT):
        folder = tmp_path_factory.mktemp(f"of{count}-")
        tensors = {f"layer{i}.weight": (torch.float32, (SIDE, SIDE)) for i in range(count)}
        write_plain(folder / "model.safetensors", tensors, (weight for _ in range(count)))
        made.append(folder)
    return made[0], made[1]


@pytest.fixture(scope="module")
def growth_bytes(folders: tuple[Path, Path]) -> dict[str, int]:
    """By verb."""
    command = [sys.executable, "-c", SCRIPT, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {verb: int(grown) for verb, grown in (line.split() for line in done.stdout.splitlines())}


def test_compress_to_and_export_hold_a_tensor_at_a_time(
    folders: tuple[Path, Path], growth_bytes: dict[str, int]
) -> None:
    """A third leaves room for an allocator's habits and the packed file, and none for the checkpoint."""
    assert growth_bytes["compress_to"] < CHECKPOINT_BYTES // 3
    assert growth_bytes["export"] < CHECKPOINT_BYTES // 3
    assert (folders[1] / "back.safetensors").stat().st_size > CHECKPOINT_BYTES


def test_holding_the_checkpoint_would_show(growth_bytes: dict[str, int]) -> None:
    assert growth_bytes["hold"] > CHECKPOINT_BYTES * 2 // 3
