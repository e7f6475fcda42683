"""How often a model runs while a budget is met as on a GPU, where a pass costs its launch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import factorpack as fp
from factorpack.calibration import joined
from tests.passes.test_segments import llama


def forward_passes(layers: int, batches: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Passes of a model and its copies, whole or in part, for 64 texts in some batches."""
    model, passes = llama(layers), 0
    inner = type(model).forward

    @functools.wraps(inner)
    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal passes
        passes += 1
        return inner(*arguments, **named)

    monkeypatch.setattr(type(model), "forward", counted)
    monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    monkeypatch.setattr(joined, "_pays", lambda _model: True)
    tokens = torch.randint(61, (64, 9), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": part} for part in tokens.chunk(batches)]
    planner = fp.Planner(samples=64, trellis=0)
    fp.compress(model, ratio=5, calibration=data, planner=planner, progress=False)
    monkeypatch.setattr(type(model), "forward", inner)
    return passes


def test_passes_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most eleven, where seven weights have four inputs: two trials of its cut; for the original one pass for all
    inputs and one to the next block, for the compressed network four and one; and one in each refinement, for all
    weights."""
    two, six = (forward_passes(layers, 2, monkeypatch) for layers in (2, 6))
    assert six - two <= 4 * (2 + 2 + 5 + 2)


def test_passes_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """None: what layers get, sensitivities and what weights do alone are found for all texts at once."""
    few, many = (forward_passes(2, batches, monkeypatch) for batches in (8, 16))
    assert many == few
