"""Property tests run the same examples every time, and no test is slow because the machine is busy."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Matrices this small gain nothing from threads, and threads that wait for a busy core spin. Programs that
# tests start read the variable; in this process it must be set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # of the few tests that ask for two

import pytest
from hypothesis import settings

from tests.forking import start_server, stop_server

if TYPE_CHECKING:  # the process that hands out the tests needs no torch
    from torch import nn

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("steady")

gc.disable()  # what is imported and collected stays to the end: to look for garbage in it took seconds


def pytest_collection_finish() -> None:
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(5_000, 20, 100)  # a search through all that tests import takes half a second
    gc.enable()
    start_server()


def pytest_sessionfinish() -> None:
    stop_server()


@pytest.fixture
def uneven_checkpoint(tmp_path: Path) -> Path:
    """Weights larger than a sample, whose rows are of unequal size, and what is kept beside them."""
    import torch
    from safetensors.torch import save_file

    from tests.helpers import seeded

    scale = torch.linspace(0.5, 2, 512)[:, None]
    state = {
        "conv1.weight": seeded(16, 3, 3, 3),
        "conv2.weight": seeded(128, 128, 3, 3, seed=1),
        "wide.weight": scale * seeded(512, 384, seed=2),
        "fc.weight": seeded(40, 512, seed=3),
        "fc.bias": seeded(40),
        "steps": torch.tensor(7),
    }
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "net.safetensors")
    return tmp_path / "in" / "net.safetensors"


@pytest.fixture
def trained_once(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The net of digits is trained once per run. Pages that name no epochs get the 5 of the examples, not 15."""
    from factorpack import digits

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # by all workers of this run
    monkeypatch.setattr(digits, "train_net", _kept_in(shared, digits.train_net))


def _kept_in(folder: Path, train_net: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    import torch

    def train_or_load(train: Any, quiet: bool = True, epochs: int = 5) -> nn.Module:
        path = folder / f"digits {epochs}.pt"
        if not path.exists():
            mine = path.with_suffix(f".{os.getpid()}")
            torch.save(train_net(train, quiet=quiet, epochs=epochs), mine)
            mine.rename(path)  # whole or not there: another worker may look
        model: nn.Module = torch.load(path, weights_only=False)
        return model

    return train_or_load
