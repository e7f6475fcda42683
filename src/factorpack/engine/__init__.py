"""Where work is done: tasks that hold no weights, run by processes here or by a cluster."""

from __future__ import annotations

from factorpack.engine.cluster import Ray
from factorpack.engine.local import Local
from factorpack.engine.task import Engine, Outcome, Task, outcomes

__all__ = ["Engine", "Local", "Outcome", "Ray", "Task", "outcomes"]
