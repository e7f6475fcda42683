"""What each of two processes under torchrun does: a plain run, one that breaks off, and the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.commands import app
from tests.tune.small_net import METHOD, loader, perceptron

SCHEDULE = fp.Schedule(epochs=2, learning_rate=1e-2, seed=5)
STEERED = fp.Schedule(epochs=4, learning_rate=1e-2, seed=5, target_ratio=2.5)


class BreakOff(Exception):
    pass


def tuned(
    path: Path,
    shuffle: bool,
    break_at: int | None = None,
    schedule: fp.Schedule = SCHEDULE,
    **settings: Any,
) -> None:
    net = perceptron()
    packed = fp.compress(net, METHOD, progress=False)
    seen = 0

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        if seen == break_at:
            raise BreakOff
        return nn.functional.cross_entropy(logits, labels)

    batches = loader(shuffle=shuffle)
    fp.finetune(packed, net, batches, loss=loss, schedule=schedule, progress=False, **settings)
    fp.save(packed, path)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    tuned(folder / f"plain.{rank}", shuffle=False)
    tuned(folder / f"shuffled.{rank}", shuffle=True)
    tuned(folder / f"steered.{rank}", shuffle=True, schedule=STEERED)
    settings: dict[str, Any] = {"checkpoint": folder / "checkpoint", "checkpoint_every": 3}
    try:
        tuned(folder / f"broken.{rank}", shuffle=True, break_at=6, **settings)
    except BreakOff:
        tuned(folder / f"resumed.{rank}", shuffle=True, **settings)
    command = ["finetune", folder / "packed", "--data", folder / "data", "-o", folder / "command", "--json"]
    options = ["--model", "tests.tune.small_net:build", "--image-size", 14, "--batch-size", 4]
    options += ["--workers", 0, "--epochs", 1]
    app([str(each) for each in (*command, *options)], standalone_mode=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
