"""Locks of the kernel's: they end with their process however that ends, so no clock or process number is trusted."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from factorpack.errors import PlanError


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Keeps other runs off `target` while the block runs; a PlanError where one is there already.

    The lock is on a hidden file beside the target; one that a killed run left means nothing. Where the
    system has no locks there is no exclusion, and every file is still written whole.
    """
    path = target.with_name(f".{target.name}.lock")
    handle = _hold(path, target)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is let go: who has this very file open looks again
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
        if is_still(handle, path):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
            return handle
        os.close(handle)


def lock(handle: int) -> bool | None:
    """Whether this process now has an open file for itself; None where the system has no such locks."""
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


def is_still(handle: int, path: Path) -> bool:
    """Whether the file that is open is the one of that name, and not one that was removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
