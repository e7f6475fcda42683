"""Trains a packed model: end to end, or block by block with a few inputs."""

from factorpack.tune.blockwise import reconstruct
from factorpack.tune.schedule import Schedule
from factorpack.tune.training import finetune

__all__ = ["Schedule", "finetune", "reconstruct"]
