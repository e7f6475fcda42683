"""Running loss and accuracy of a training run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from factorpack.errors import SourceError


class NotFiniteError(SourceError):
    """The loss is no number any more."""


class Meter:
    """Loss and accuracy since the last `read`, which waits for the device and is therefore called rarely."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._hits: list[Tensor] = []
        self._text = ""

    def add(self, loss: Tensor, hits: Tensor | None) -> None:
        self._losses.append(loss)
        self._hits += [] if hits is None else [hits]

    def read(self, step: int) -> None:
        loss = torch.stack(self._losses).float().mean().item()
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the loss is {loss} at step {step}: lower the learning rate, or check the data for NaN"
            )
        accuracy = f", accuracy {torch.stack(self._hits).mean().item():.1%}" if self._hits else ""
        self._text = f"loss {loss:.4f}{accuracy}"
        self._losses, self._hits = [], []

    def __str__(self) -> str:
        return self._text
