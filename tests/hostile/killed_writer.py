"""Writes one of two versions over a packed file and is killed, many times; run by test_kill.

Children are forked, so that each starts with everything imported and dies within milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from factorpack.format import atomic
from factorpack.format.container import Reader
from factorpack.record import Encoded
from tests.helpers import write_packed

STEPS = ("write", "flush", "fsync", "replace", "replaced")


def version(number: int) -> dict[str, Encoded]:
    values = torch.full((200_000,), number, dtype=torch.int64)
    return {"values": Encoded("keep", (200_000,), torch.int64, {"values": values})}


def version_of(path: Path) -> int:
    """Which version a file is, every number of it."""
    values = Reader(path)["values"].parts["values"]
    number = int(values[0])
    assert bool((values == number).all())
    return number


def killed(child: Callable[[], None], after_s: float | None) -> bool:
    """Forks, runs `child`, kills it after a while or waits for it to kill itself."""
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(1)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def at_random(path: Path, rounds: int) -> list[int]:
    def write_forever() -> None:
        while True:
            write_packed(path, version(2))
            write_packed(path, version(1))

    generator = random.Random(0)
    seen = []
    for _ in range(rounds):
        assert killed(write_forever, generator.uniform(0.002, 0.06))
        seen.append(version_of(path))
    return seen


def at_every_step(path: Path) -> dict[str, int]:
    """Kills the writer of version 2 just before a step of the atomic write, or after the last."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_until(step: str) -> Callable[[], None]:
        def child() -> None:
            if step in ("fsync", "replace"):
                setattr(atomic.os, step, die)
            elif step == "replaced":
                atomic._sync_folder = die
            else:
                real = Path.open
                Path.open = lambda *args: Dying(real(*args), step, die)  # type: ignore[assignment, method-assign]
            write_packed(path, version(2))

        return child

    seen = {}
    for step in STEPS:
        write_packed(path, version(1))
        assert killed(write_until(step), None), step
        seen[step] = version_of(path)
    return seen


class Dying:
    """A file that ends its process at one of its methods."""

    def __init__(self, file: object, step: str, die: Callable[[], None]) -> None:
        self._file, self._step, self._die = file, step, die

    def __getattr__(self, name: str) -> object:
        return self._die if name == self._step else getattr(self._file, name)

    def __enter__(self) -> Dying:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked child has no other threads
    target = Path(sys.argv[1])
    write_packed(target, version(1))
    print(json.dumps({"random": at_random(target, int(sys.argv[2])), "steps": at_every_step(target)}))
