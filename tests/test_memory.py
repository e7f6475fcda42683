"""Streaming verbs hold one tensor, not the checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from factorpack.format.container import write_plain
from tests.forking import run_forked
from tests.helpers import seeded

COUNT, SIDE = 48, 1024
TENSOR_BYTES = 4 * SIDE * SIDE
CHECKPOINT_BYTES = COUNT * TENSOR_BYTES

# The peak is the kernel's mark for this process alone: getrusage's also holds what its parent had at the
# start. The verb runs on a checkpoint of one tensor first, so that only holding more of them shows.
SCRIPT = """
import re, sys
from pathlib import Path
import factorpack as fp
from tests.helpers import compress_to

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

method = fp.QSPCA(16, 3, tile=64, clip="minmax")
verbs = {
    "compress_to": lambda at: compress_to(at / "packed.safetensors", at / "model.safetensors", method),
    "export": lambda at: fp.load(at / "packed.safetensors").decode_to(at / "back.safetensors"),
    "hold": lambda at: fp.compress(at / "model.safetensors", fp.Keep()),
}
verb, one, many = verbs[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3])
verb(one)
before = peak_bytes()
held = verb(many)
print(peak_bytes() - before)
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


def growth_bytes(verb: str, folders: tuple[Path, Path]) -> int:
    command = [sys.executable, "-c", SCRIPT, verb, *map(str, folders)]
    return int(run_forked(command, check=True).stdout)


def test_compress_to_and_export_hold_a_tensor_at_a_time(folders: tuple[Path, Path]) -> None:
    """A third leaves room for an allocator's habits and the packed file, and none for the checkpoint."""
    assert growth_bytes("compress_to", folders) < CHECKPOINT_BYTES // 3
    assert growth_bytes("export", folders) < CHECKPOINT_BYTES // 3
    assert (folders[1] / "back.safetensors").stat().st_size > CHECKPOINT_BYTES


def test_holding_the_checkpoint_would_show(folders: tuple[Path, Path]) -> None:
    assert growth_bytes("hold", folders) > CHECKPOINT_BYTES * 2 // 3
