"""Engines: tasks that hold no weights, run by processes on this machine or by a cluster."""

from __future__ import annotations

from factorpack.engine.cluster import Ray
from factorpack.engine.local import Local
from factorpack.engine.task import Engine, Outcome, Task, keep_workers, run_tasks

__all__ = ["Engine", "Local", "Outcome", "Ray", "Task", "keep_workers", "run_tasks"]
