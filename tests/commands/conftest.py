"""What several tests of commands are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from tests.helpers import seeded
from tests.tune.small_net import METHOD, build, write_images


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {
        "conv1.weight": seeded(8, 3, 3, 3),
        "conv2.weight": seeded(64, 32, 3, 3),
        "fc.weight": seeded(10, 64),
        "fc.bias": seeded(10),
        "steps": torch.tensor(7),
    }
    save_file(state, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_images(tmp_path / "data" / "train", 4)
    write_images(tmp_path / "data" / "val", 2)
    return tmp_path / "data"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    fp.save(fp.compress(build(), METHOD), tmp_path / "net.packed.safetensors")
    return tmp_path / "net.packed.safetensors"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_file(build().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"
