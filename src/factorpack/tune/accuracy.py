"""Accuracy of a classifier on batches of (inputs, labels)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import device_of, evaluating
from factorpack.errors import SourceError
from factorpack.progress import Progress, ProgressOption


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of samples whose class is the top prediction, or among the top five."""

    top1: float
    top5: float
    samples: int
    samples_per_s: float


def evaluate(model: nn.Module, batches: Iterable[Any], progress: ProgressOption = True) -> Accuracy:
    """Runs a model over labelled batches in evaluation mode, on its own device."""
    device = device_of(model)
    total = len(batches) if isinstance(batches, Sized) else 0
    first, five, samples, started = 0, 0, 0, time.perf_counter()
    with evaluating(model), torch.inference_mode(), Progress("evaluating", total, progress) as bar:
        for inputs, labels in batches:
            logits = _logits(model, inputs.to(device))
            ranked = logits.topk(min(5, logits.shape[1]), 1).indices
            hits = ranked == labels.to(device)[:, None]
            first += int(hits[:, 0].sum())
            five += int(hits.sum())
            samples += len(labels)
            bar.advance(f"top-1 {first / samples:.2%}", 1)
    if samples == 0:
        raise SourceError("no batches to evaluate on")
    return Accuracy(first / samples, five / samples, samples, samples / (time.perf_counter() - started))


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    try:
        logits: Tensor = model(inputs)
    except RuntimeError as error:  # what torch raises for inputs of a wrong shape
        raise SourceError(f"the model fails on inputs of shape {tuple(inputs.shape)}: {error}") from error
    return logits
