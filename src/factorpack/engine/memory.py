"""How much memory is free for tasks."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Free memory on this machine, within the container's limit if it has one; None if unknown."""
    known = [count for count in (_free_on_machine(), _free_in_cgroup()) if count is not None]
    return min(known, default=None)


def _free_on_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _free_in_cgroup() -> int | None:
    try:
        limit, used = (
            (_CGROUP / name).read_text(encoding="utf-8").strip() for name in ("memory.max", "memory.current")
        )
        return None if limit == "max" else max(int(limit) - int(used), 0)
    except (OSError, ValueError):
        return None
