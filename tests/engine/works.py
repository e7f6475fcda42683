"""Functions that workers of the tests run; a task names one of them and small arguments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from factorpack.errors import WeightError


def doubled(number: int) -> int:
    return 2 * number


def threads() -> int:
    return torch.get_num_threads()


def process() -> int:
    return os.getpid()


def refused(name: str) -> None:
    raise WeightError(f"no code can stand for {name}")


class Odd(Exception):
    """Cannot be rebuilt from its message alone, as pickle would."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def odd() -> None:
    raise Odd(1, 2)


def dies(marks: Path, times: int) -> str:
    """Kills its own worker the first `times` times it is called."""
    seen = len(list(marks.iterdir()))
    if seen < times:
        (marks / str(seen)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def dies_first(marks: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function, once the first worker that was to do it is dead."""
    dies(marks, 1)
    return function(*arguments)


GPUS: list[int] = []


def gpu() -> int:
    """The GPU that was made the current one last."""
    time.sleep(0.1)  # so that no worker does all of the tasks
    return GPUS[-1]


def noted(log: Path, name: str, seconds: float = 0.0) -> None:
    """Leaves a line when it begins and one when it ends."""
    with log.open("a") as file:
        file.write(f"+{name}\n")
    time.sleep(seconds)
    with log.open("a") as file:
        file.write(f"-{name}\n")
