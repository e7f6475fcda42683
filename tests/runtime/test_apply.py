"""`packed.apply` on whole models: every mode gives the same answers, and says what it did."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.runtime import timing as measure
from factorpack.runtime.apply import MODES, resident_bytes
from tests.helpers import assert_close, seeded
from tests.runtime.layer_cases import compress


class Net(nn.Module):
    """A layer that can be factored, one that cannot, one that does not run, and a weight no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.idle = nn.Linear(18, 18)
        self.mixing = nn.Parameter(torch.randn(200, 45))
        self.head = nn.Linear(45, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.up(self.norm(self.conv(inputs)).relu()).flatten(1)
        answers: Tensor = self.head(features @ self.mixing)
        return answers


METHOD = fp.QSPCA(4, 4, tile=9)
IMAGES = seeded(2, 4, 4, 4)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def packed(model: nn.Module) -> fp.Packed:
    return fp.compress(model, METHOD, layers={"*weight": METHOD, "mixing": fp.Scalar(4)}, progress=False)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_answers_alike(mode: str, model: nn.Module, packed: fp.Packed) -> None:
    expected = packed.load_into(copy.deepcopy(model))(IMAGES)
    applied = packed.apply(model, mode, example=IMAGES)  # type: ignore[arg-type]
    assert applied.model is model
    assert_close(model(IMAGES), expected)
    coded = {name for name, encoded in packed.items() if encoded.kind not in ("keep", "constant")}
    assert {layer.name for layer in applied.layers} == coded
    assert str(applied).count("\n") == len(coded) - 1


def test_what_cannot_be_done_is_reported(model: nn.Module, packed: fp.Packed) -> None:
    reports = {layer.name: layer for layer in packed.apply(model, "factored").layers}
    assert {name: report.mode for name, report in reports.items()} == {
        "conv.weight": "factored",
        "up.weight": "packed",
        "idle.weight": "factored",
        "head.weight": "factored",
        "mixing": "dense",
    }
    assert "ConvTranspose2d" in reports["up.weight"].note
    assert "no layer" in reports["mixing"].note
    assert reports["conv.weight"].note == ""


def test_a_packed_model_holds_less(model: nn.Module, packed: fp.Packed) -> None:
    dense = resident_bytes(model)
    kept = sum(
        tensor.nbytes for name, tensor in model.state_dict().items() if packed[name].kind == "keep"
    ) + sum(encoded.numel * 4 for name, encoded in packed.items() if name == "mixing")
    applied = packed.apply(model, "packed")
    codes = sum(
        -(-encoded.bits[name] * part.numel() // 8) if name in encoded.bits else part.nbytes
        for tensor, encoded in packed.items()
        if encoded.kind == "factors"
        for name, part in encoded.parts.items()
    )
    assert applied.resident_bytes == kept + codes < dense


@pytest.mark.parametrize("fastest", ["dense", "packed", "factored"])
def test_auto_takes_the_fastest(
    fastest: str, model: nn.Module, packed: fp.Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(runs: dict[str, object], *_: object) -> dict[str, float]:
        return {mode: 1.0 if mode == fastest else 2.0 for mode in runs}

    monkeypatch.setattr(measure, "least_seconds", pretend)
    reports = {layer.name: layer for layer in packed.apply(model, "auto", example=IMAGES).layers}
    assert reports["conv.weight"].mode == reports["head.weight"].mode == fastest
    assert reports["conv.weight"].seconds[fastest] == 1.0
    assert reports["up.weight"].mode == ("packed" if fastest == "packed" else "dense")
    assert (reports["idle.weight"].mode, reports["idle.weight"].note) == (
        "dense",
        "it does not run on the example",
    )


def test_auto_gives_time_for_memory_where_it_may(
    model: nn.Module, packed: fp.Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measure, "least_seconds", lambda runs, *_: {mode: 1.0 if mode == "dense" else 1.1 for mode in runs}
    )
    applied = packed.apply(model, "auto", example=IMAGES, slack=0.05)
    modes = {layer.name: layer.mode for layer in applied.layers}
    assert modes["head.weight"] != "dense"  # saves the most
    assert modes["conv.weight"] == modes["up.weight"] == "dense"


def test_auto_adds_up_the_times_a_layer_runs_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.BatchNorm1d(16), nn.ReLU(), layer).train()
    packed = compress(model, fp.Scalar(4))
    monkeypatch.setattr(measure, "least_seconds", lambda runs, *_: dict.fromkeys(runs, 1.0))
    applied = packed.apply(model, "auto", example=seeded(4, 16))
    assert dict(applied.layers[0].seconds) == {"dense": 2.0, "packed": 2.0}
    assert not layer._forward_hooks
    assert model.training
    assert model[1].training
    assert int(model[1].num_batches_tracked) == 0  # type: ignore[arg-type]


def test_times_are_taken_in_turns_after_a_warm_up() -> None:
    calls: list[str] = []
    runs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = measure.least_seconds(runs, (), {})
    assert calls[:6] == ["a", "b", "b", "a", "a", "b"]  # neither always runs in the other's wake
    assert len(calls) == 2 * (measure.ROUNDS + 1)
    assert all(0 < seconds < 1 for seconds in found.values())


def test_impossible_wishes_are_refused_and_change_nothing(model: nn.Module, packed: fp.Packed) -> None:
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fp.PlanError, match="'fast', known are dense, packed, coded, factored, auto"):
        packed.apply(model, "fast")  # type: ignore[arg-type]
    with pytest.raises(fp.PlanError, match="give it an example batch"):
        packed.apply(model, "auto")
    with pytest.raises(fp.PlanError, match=r"slack is -0\.1, allowed are 0 and more"):
        packed.apply(model, "auto", example=IMAGES, slack=-0.1)
    with pytest.raises(fp.SourceError, match="the model lacks"):
        packed.apply(nn.Linear(3, 3), "packed")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_is_packed_once(model: nn.Module, packed: fp.Packed) -> None:
    packed.apply(model, "packed")
    with pytest.raises(fp.SourceError, match="the model lacks"):
        packed.apply(model, "packed")


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_class_of_the_users_own_stays_as_it_is() -> None:
    model = nn.Sequential(Doubled(16, 8))
    packed = compress(model, fp.Scalar(4))
    expected = packed.load_into(copy.deepcopy(model))(seeded(1, 16))
    applied = packed.apply(model, "packed")
    assert type(model[0]) is Doubled
    assert applied.layers[0].mode == "dense"
    assert_close(model(seeded(1, 16)), expected)
