"""The loop that meets a size: the planner's answer is a method per weight, and one weight closes the gap."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.budget.goals import compress_to_bytes, original_bytes
from factorpack.budget.planner import BudgetRequest, Planner
from factorpack.format import encode_ahead
from factorpack.methods import SecondOrder
from factorpack.record import Encoded
from factorpack.source import open_source
from factorpack.weight import Weight
from tests.helpers import assert_same_encoded, seeded


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, 60)).eval()


def test_its_methods_given_by_name_make_the_same_codes(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no second way around `encode`: what it did last for each weight can be asked for."""
    used: dict[tuple[int, ...], SecondOrder] = {}
    real = SecondOrder.encode

    def encode(self: SecondOrder, weight: Weight) -> Encoded:
        used[weight.shape] = self
        return real(self, weight)

    monkeypatch.setattr(SecondOrder, "encode", encode)
    planned = fp.compress(net, ratio=10, progress=False)
    methods = {name: used[planned[name].shape] for name in planned if planned[name].shape in used}
    assert len(methods) == 3
    monkeypatch.undo()
    named = fp.compress(net, fp.Keep(), layers=methods, progress=False)
    for name in methods:
        assert named[name].note.startswith("chosen by")
        assert planned[name].note == ""
        for part, values in planned[name].parts.items():
            assert torch.equal(named[name].parts[part], values), (name, part)


@pytest.mark.parametrize("calibrated", [False, True])
def test_only_the_weight_that_changed_is_coded_again(
    calibrated: bool, net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded: list[str] = []
    real = encode_ahead.stored

    def stored(name: str, encoded: Encoded, pool: Executor | None = None) -> object:
        if encoded.bits:
            coded.append(name)
        return real(name, encoded, pool)

    monkeypatch.setattr(encode_ahead, "stored", stored)
    monkeypatch.setattr("factorpack.budget.meet.LEAST", 0.99999)  # several tries to close the gap
    batches = [seeded(20, 3, 12, 12)] if calibrated else None
    fp.compress(net, max_bytes=9000, calibration=batches, progress=False)
    counts = Counter(coded)
    assert len(counts) == 3
    passes = min(counts.values())
    assert sorted(counts.values())[:2] == [passes, passes], "the two others once for each pass"
    assert max(counts.values()) > passes


def test_the_same_request_twice(net: nn.Module) -> None:
    request = BudgetRequest(open_source(net), net, [seeded(20, 3, 12, 12)], Planner(), {}, (), progress=False)
    size = original_bytes(request.source) // 9
    first, second = (compress_to_bytes(request, size).tensors for _ in range(2))
    for name in first:
        assert_same_encoded(second[name], first[name])
