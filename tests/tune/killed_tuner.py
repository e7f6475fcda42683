"""Kills fine-tuning runs at random steps, lets them go on, and prints which ended in other bytes.

The runs are children of one process, forked after its imports.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import factorpack as fp
from tests.tune.small_net import METHOD, Shaken, perceptron

EPOCHS, STEPS = 2, 10
KILLED = -signal.SIGKILL
HELD_OUT = "held out"
"""The run that measures on some of its inputs; the loss of these counts as a step."""


def own_generator(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(
        Shaken(18),
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(3),
    )


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Shaken(20), batch_size=4, shuffle=True),
    "own generator": own_generator,
    "worker": lambda: own_generator(workers=1),
    "in order": lambda: DataLoader(Shaken(20), batch_size=4),
    HELD_OUT: lambda: DataLoader(Shaken(20), batch_size=4, shuffle=True),
}
EVERY = {"shuffled": [1, 2, 5, 7], "own generator": [2, 7], "worker": [2], "in order": [1, 5], HELD_OUT: [3]}


def tune(
    path: Path, batches: Iterable[Any], checkpoint: Path | None, every: int, die_at: int | None, where: str
) -> None:
    """A run that ends its own process in the loss of step `die_at`, or just before a save."""
    net = perceptron(norm=True, drop=0.3)
    packed = fp.compress(net, METHOD, progress=False)
    seen = 0

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        if seen == die_at and where == "step":
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(logits, labels)

    if where == "save" and die_at is not None:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    share = 0.125 if HELD_OUT in path.name else 0.0
    schedule = fp.Schedule(epochs=EPOCHS, learning_rate=1e-2, seed=5, held_out_share=share)
    fp.finetune(
        packed,
        net,
        batches,
        loss=loss,
        schedule=schedule,
        checkpoint=checkpoint,
        checkpoint_every=every,
        progress=False,
    )
    fp.save(packed, path)


def forked(*arguments: Any) -> int:
    """Exit code of a child that tunes; minus the signal where it was killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            tune(*arguments)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(folder: Path, name: str, every: int, kills: list[tuple[int, str]]) -> bool:
    """Whether a run with a checkpoint, killed in between or not, ends as one without ends."""
    expected, found = folder / f"{name}.whole", folder / f"{name}.{every}"
    if not expected.exists():
        assert forked(expected, LOADERS[name](), None, 1, None, "") == 0
    checkpoint = folder / "checkpoint"
    checkpoint.unlink(missing_ok=True)
    for die_at, where in kills:
        assert forked(found, LOADERS[name](), checkpoint, every, die_at, where) == KILLED
        assert not found.exists()
    assert forked(found, LOADERS[name](), checkpoint, every, None, "") == 0
    return found.read_bytes() == expected.read_bytes()


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # a forked child has no other threads
    tune(folder / "first", LOADERS["in order"](), None, 1, None, "")  # imports what children would, each anew
    draw = random.Random(int(sys.argv[2]))
    same = {}
    for name in LOADERS:
        for every in EVERY[name]:
            first = draw.randrange(1, STEPS + 1)
            left = STEPS - (first - 1) // every * every
            kills = [(first, "step"), (draw.randrange(1, left + 1), "step")]
            same[f"{name}, every {every}, killed at {kills}"] = run(folder, name, every, kills)
            (folder / f"{name}.{every}").unlink()
    same["not killed"] = run(folder, "shuffled", 3, [])
    same["killed while it saves"] = run(folder, "shuffled", 4, [(1, "save"), (9, "step")])
    print(json.dumps(same))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
