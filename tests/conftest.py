"""Property tests run the same examples every time, and no test is slow because the machine is busy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Matrices this small gain nothing from threads, and threads that wait for a busy core spin. Programs that
# tests start read the variable; in this process it must be set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings
from torch import nn

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("steady")

torch.set_num_threads(1)


@pytest.fixture
def trained_once(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The net of digits is trained once per run and setting: pages, examples and the demo train the same one."""
    from factorpack import digits

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # by all workers of this run
    monkeypatch.setattr(digits, "train_net", _kept_in(shared, digits.train_net))


def _kept_in(folder: Path, train_net: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def train_or_load(train: Any, quiet: bool = True, **settings: Any) -> nn.Module:
        path = folder / f"digits {settings}.pt"
        if not path.exists():
            mine = path.with_suffix(f".{os.getpid()}")
            torch.save(train_net(train, quiet=quiet, **settings), mine)
            mine.rename(path)  # whole or not there: another worker may look
        model: nn.Module = torch.load(path, weights_only=False)
        return model

    return train_or_load
