"""Kernel locks: they end with their process, however it ends, so that no clock or process id is trusted."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from factorpack.errors import PlanError


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Keeps other runs from `target` while the block runs; a PlanError where another run already has it.

    The lock is on a hidden file beside the target; such a file left from a killed run has no effect. Where
    the system has no locks there is no exclusion, and every file is still written completely.
    """
    path = target.with_name(f".{target.name}.lock")
    handle = _hold(path, target)
    try:
        yield
    finally:
        path.unlink(
            missing_ok=True
        )  # before the lock is released: a process that has this file open then tries again
        os.close(handle)


def _hold(path: Path, target: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if lock(handle) is False:
            holder = os.read(handle, 200).decode(errors="replace") or "another process"
            os.close(handle)
            raise PlanError(
                f"{target} is being written by another run ({holder}): "
                "wait for it, end it, or choose another name"
            )
        if is_same_file(handle, path):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
            return handle
        os.close(handle)


def lock(handle: int) -> bool | None:
    """Whether this process now holds the lock of an open file; None where the system has no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def is_same_file(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at this path, and was not removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
