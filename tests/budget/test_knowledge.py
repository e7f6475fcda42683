"""What is learnt of a model: inputs are held out only while it is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.budget import knowledge
from factorpack.budget.tensors import Tensors
from factorpack.calibration.calibrate import Calibration
from factorpack.calibration.walk import Walk
from factorpack.record import LayerMoments
from factorpack.weight import Weight
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


class Mixed(nn.Module):
    """A layer with a norm behind it, one with a bias, and one with neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 48, bias=False), nn.BatchNorm1d(48)
        self.second, self.third = nn.Linear(48, 48), nn.Linear(48, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.norm(self.first(x)).relu()).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("settings", "kept", "restored"),
    [
        ({}, {}, ["first", "second"]),
        ({}, {"second.bias": fp.Keep()}, ["first"]),
        ({}, {"norm.running_mean": fp.Keep()}, ["second"]),
        ({"correct_means": False}, {}, []),
        ({"about_means": False}, {}, []),
    ],
)
def test_moments_are_about_the_mean_where_mean_outputs_are_restored(
    settings: dict[str, Any],
    kept: dict[str, fp.Keep],
    restored: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, bool] = {}
    inner = knowledge.Knowledge.weight

    def weight(
        self: knowledge.Knowledge, tensors: Tensors, name: str, moments: LayerMoments | None
    ) -> Weight:
        found = inner(self, tensors, name, moments)
        seen[name] = isinstance(found.inputs, LayerMoments) and found.inputs.restores_mean
        return found

    monkeypatch.setattr(knowledge.Knowledge, "weight", weight)
    torch.manual_seed(0)
    planner = fp.Planner(**settings)
    fp.compress(
        Mixed().eval(),
        ratio=5,
        calibration=[seeded(64, 32)],
        planner=planner,
        layers=kept,
        progress=False,
    )
    assert seen == {f"{layer}.weight": layer in restored for layer in ("first", "second", "third")}


def test_codes_follow_a_trellis_by_default_whatever_rounds_them() -> None:
    assert fp.Planner().trellis == 8
    assert fp.Planner(trellis=0).trellis == 0
