"""What each of two processes does: a plain run, one that breaks off, and the command.

The processes are forked after the imports and get the variables that torchrun sets.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.commands import app, command_line
from tests.tune.small_net import METHOD, loader, perceptron

SCHEDULE = fp.Schedule(epochs=2, learning_rate=1e-2, seed=5, held_out_share=0.0)
STEERED = replace(SCHEDULE, epochs=4, target_ratio=2.5, shrink_by="training")


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


def forked(rank: int, port: int, folder: Path) -> int:
    """The process number of a child that is one of two."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": port,
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in numbers.items()}
        main(folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked child has no other threads
    # What children would import, each anew.
    torch.optim.Adam([torch.zeros(1)])
    assert accelerate.__version__
    command_line("finetune")
    port = free_port()
    children = [forked(rank, port, Path(sys.argv[1])) for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))
