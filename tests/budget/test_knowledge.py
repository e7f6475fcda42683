"""What is learnt of a model: inputs are held out only while it is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.budget import knowledge
from factorpack.calibration.calibrate import Calibration
from factorpack.calibration.walk import Walk
from tests.helpers import seeded


@pytest.mark.parametrize("refine", [True, False])
def test_weights_are_coded_on_all_inputs_and_planned_on_some(
    refine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, int]] = []

    def walk(inputs: Calibration, original: nn.Module, compressed: nn.Module | None, *others: Any) -> Walk:
        seen.append((compressed is not None, len(inputs)))
        return Walk(inputs, original, compressed, *others)

    monkeypatch.setattr(knowledge, "Walk", walk)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 64)).eval()
    planner = fp.Planner(refine=refine)
    fp.compress(net, ratio=5, calibration=[seeded(64, 32)], planner=planner, progress=False)
    assert {count for coding, count in seen if coding} == {64}
    assert {count for coding, count in seen if not coding} == {56 if refine else 64}


def test_codes_follow_a_trellis_by_default_whatever_rounds_them() -> None:
    assert fp.Planner().trellis == 8
    assert fp.Planner(trellis=0).trellis == 0
