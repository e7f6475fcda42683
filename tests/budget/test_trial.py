"""Curves corrected by what a weight alone does to the outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.batches import hooked
from factorpack.budget.curves import Curve
from factorpack.budget.divergence import Reference, divergence_of
from factorpack.budget.norms import correct_outputs
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.budget.side_by_side import Replacement, SideBySide
from factorpack.budget.trial import (
    SingleWeightTrial,
    _inputs_to_measure,
)
from factorpack.calibration.calibrate import calibrate
from factorpack.calibration.walk import Walk
from factorpack.decoding import decode
from factorpack.methods import Keep, Scalar
from factorpack.passes.segments import Border
from factorpack.record import Encoded
from factorpack.weight import Weight
from tests.helpers import seeded

CURVE = Curve([0.1, 0.2, 0.4], [300, 200, 100], [1.0, 4.0, 16.0], 800, 1, 0.5)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5)).eval()


def test_divergence_of_two_coins_by_hand() -> None:
    """KL((1/2, 1/2), (1/4, 3/4)) = (ln 2 + ln 2/3) / 2."""
    wanted = Predictions(torch.zeros(3, 2), are_logits=True)
    found = Predictions(torch.tensor([[0.0, math.log(3.0)]]).expand(3, 2), are_logits=True)
    total, count = divergence_of(wanted, found)
    assert count == 3
    assert total / count == pytest.approx((math.log(2) + math.log(2 / 3)) / 2)
    assert divergence_of(found, found) == (0.0, 3)


@pytest.mark.parametrize("width", [1, 3])
def test_values_are_the_mean_of_a_gaussian_of_their_own_deviation(width: int) -> None:
    wanted = torch.tensor([[-1.0], [1.0]]).expand(2, width)
    found = divergence_of(Predictions(wanted, are_logits=False), Predictions(wanted + 0.5, are_logits=False))
    assert found == (pytest.approx(2 * width * 0.25 / 2), 2)


@pytest.mark.parametrize("at_once", [1 << 30, 20])
@pytest.mark.parametrize(("many", "precision"), [(1 << 22, 1e-12), (1, 1e-4)], ids=["FP64", "FP32"])
def test_divergences_of_several_copies_from_what_is_kept_of_the_original(
    at_once: int, many: int, precision: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where sums of products stand for the differences, and FP32 is enough for many logits."""
    before, after = 3 * seeded(600, 5), 3 * seeded(600, 5) + 0.1 * seeded(2, 600, 5, seed=1)
    wanted = Predictions(before, are_logits=True)
    expected = [divergence_of(wanted, Predictions(each, are_logits=True))[0] for each in after]
    monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    monkeypatch.setattr("factorpack.budget.divergence.MOST_AT_ONCE", at_once)
    monkeypatch.setattr("factorpack.budget.divergence.MANY", many)
    found = Reference(wanted).divergences(Predictions(after.flatten(0, 1), are_logits=True), 2)
    assert found.tolist() == pytest.approx(expected, rel=precision)
    assert found.dtype == torch.float64
    assert divergence_of(wanted, wanted) == (0.0, 600)


def test_one_weight_alone_and_the_model_as_it_was() -> None:
    model, inputs = net(), seeded(16, 12)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trial = SingleWeightTrial(model, calibrate(model, [inputs], 16))
    rough = Scalar(2).encode(Weight(model.state_dict()["0.weight"]))
    found = trial.divergence("0.weight", rough)
    other = net()
    other.load_state_dict(before | {"0.weight": decode(rough)})
    with torch.no_grad():
        total, count = divergence_of(predictions_of(model(inputs)), predictions_of(other(inputs)))
    assert found == pytest.approx(total / count)
    assert (
        trial.divergence("0.weight", Keep().encode(Weight(before["0.weight"]))) == 0.0
    )  # nothing stayed behind
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Convolutions(nn.Module):
    """Blocks of a convolution with a norm behind it and a grouped one with a bias; and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1, bias=False),
                    nn.BatchNorm2d(8),
                    nn.ReLU(),
                    nn.Conv2d(8, 8, 1, groups=2),
                )
                for _ in range(3)
            )
        )
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "in one pass"])
def test_a_mean_output_that_will_be_restored_does_not_count(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is the model in which the norm or the bias has made up for the mean."""
    torch.manual_seed(0)
    model, inputs = Convolutions().eval(), 1 + seeded(8, 8, 5, 5)
    for norm in (block[1] for block in model.blocks):
        norm.running_mean.uniform_(-0.3, 0.3)
    calibration = calibrate(model, [inputs], 8)
    layers = [f"blocks.{block}.{layer}" for block in range(3) for layer in (0, 3)] + ["last"]
    moments = Walk(calibration, model, None, layers).collect(layers)
    weights, codes, expected = dict[str, Weight](), dict[str, Encoded](), dict[str, float]()
    for layer in layers:
        name, seen = f"{layer}.weight", moments[layer]
        values = model.get_submodule(layer).weight.detach()
        weights[name] = Weight(values, inputs=replace(seen, restores_mean=True))
        codes[name] = Scalar(2).encode(Weight(values))
        other = copy.deepcopy(model)
        changed = other.get_submodule(layer)
        changed.weight.data = decode(codes[name])
        norm = other.get_submodule(layer[:-1] + "1") if layer.endswith(".0") else None
        assert correct_outputs(
            changed, norm, changed.weight.detach().flatten(1), values.flatten(1), seen, variances=False
        )
        with torch.no_grad():
            total, count = divergence_of(predictions_of(model(inputs)), predictions_of(other(inputs)))
        expected[name] = total / count
    if together:
        monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    trial = SingleWeightTrial(model, calibration)
    before = {name: value.clone() for name, value in trial.state.items()}
    assert trial._copies.are_independent()
    assert dict(trial.divergences(codes, weights)) == pytest.approx(expected, rel=1e-3)
    assert dict(trial.divergences(codes)) != pytest.approx(expected, rel=0.05)
    assert all(torch.equal(value, before[name]) for name, value in trial.model.state_dict().items())
    assert trial.model.state_dict().keys() == before.keys()


@pytest.mark.parametrize(("inputs", "differ"), [(64, True), (15, False)])
def test_a_plan_is_refined_where_there_are_inputs_to_keep_aside(inputs: int, differ: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 300), nn.ReLU(), nn.Linear(300, 200)).eval()
    data = [seeded(inputs, 96)]
    steps = [
        fp.compress(model, ratio=8, calibration=data, planner=fp.Planner(refine=refine), progress=False)
        .curves["0.weight"]
        .step_at_unit_slope
        for refine in (True, False)
    ]
    assert (steps[0] != steps[1]) == differ


class Blocks(nn.Module):
    """A chain of blocks; the first and the last layer share a weight, as embeddings and heads do."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 12)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("room", [1 << 30, 3000, 1])
def test_a_trial_from_a_border_is_one_of_the_whole_model(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all activations at borders are kept, some of them, or none."""
    monkeypatch.setattr("factorpack.budget.trial.CPU_BORDER_BYTES", room)
    torch.manual_seed(0)
    model, batches = Blocks(3).eval(), [seeded(7, 12), seeded(5, 12, seed=1)]
    held_out = calibrate(model, batches)
    assert len(held_out.segments(model)) > 2
    trial = SingleWeightTrial(model, held_out)
    for name, value in model.state_dict().items():
        if value.dim() == 2 and name != "last.weight":
            rough = Scalar(2).encode(Weight(value))
            changed = copy.deepcopy(model)
            changed.state_dict()[name].copy_(decode(rough))
            with torch.no_grad():
                found = [
                    divergence_of(*(predictions_of(net(b)) for net in (model, changed))) for b in batches
                ]
            expected = sum(total for total, _ in found) / sum(count for _, count in found)
            assert trial.divergence(name, rough) == expected


def test_a_trial_runs_from_its_weight_on() -> None:
    model = Blocks(6).eval()
    trial = SingleWeightTrial(model, calibrate(model, seeded(8, 12)))
    ran: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: ran.append(name)

    layers = [name for name, module in trial.model.named_modules() if isinstance(module, nn.Linear)]
    with hooked(trial.model, after={name: note(name) for name in layers}):
        trial.divergence("blocks.4.2.weight", Scalar(2).encode(Weight(model.blocks[4][2].weight.detach())))
    assert [name for name in ran if name.startswith("blocks")] == [
        "blocks.4.0",
        "blocks.4.2",
        "blocks.5.0",
        "blocks.5.2",
    ]


@pytest.mark.parametrize(("blocks", "measured"), [(10, 32), (50, 20), (500, 4)])
def test_many_weights_are_measured_on_fewer_inputs(blocks: int, measured: int) -> None:
    """Two trials per weight, of half a pass each, within eight passes over eight times the held-out inputs."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 * blocks))).eval()
    assert _inputs_to_measure(model, calibrate(model, seeded(32, 4)), segments=10**6) == measured


class Centred(nn.Module):
    """Blocks whose samples are centred over the batch: they depend on one another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = Blocks(3), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.blocks(x)
        return self.head(found - found.mean(0))  # type: ignore[no-any-return]


class TimeFirst(nn.Module):
    """Texts whose activations have time before samples, as some recurrent networks do."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.blocks, self.flat = Blocks(3), flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x.transpose(0, 1)
        found = (
            self.blocks(inner.flatten(0, 1)).unflatten(0, inner.shape[:2])
            if self.flat
            else self.blocks(inner)
        )
        return found.transpose(0, 1).mean(1)  # type: ignore[no-any-return]


def rough_codes(model: nn.Module) -> dict[str, Encoded]:
    return {
        name: Scalar(2).encode(Weight(value))
        for name, value in model.state_dict().items()
        if value.dim() == 2 and not name.endswith("last.weight")
    }


def count_rows(
    trial: SingleWeightTrial, layer: str, codes: Mapping[str, Encoded]
) -> tuple[list[int], dict[str, float]]:
    """Samples of each run of a layer while weights are tried, and their divergences."""
    rows: list[int] = []
    with hooked(trial.model, after={layer: lambda _module, _inputs, output: rows.append(len(output))}):
        found = dict(trial.divergences(codes))
    return rows, found


@pytest.mark.parametrize("room", [1 << 29, 2000, 1])
def test_weights_tried_in_one_pass_diverge_as_they_do_alone(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all copies fit into memory at once, some of them, or one; the shared weight is tried alone."""
    monkeypatch.setattr("factorpack.budget.side_by_side.COPY_BYTES", room)
    torch.manual_seed(0)
    model, batches = Blocks(3).eval(), [seeded(7, 12), seeded(5, 12, seed=1)]
    trial, codes = SingleWeightTrial(model, calibrate(model, batches)), rough_codes(model)
    before = {name: value.clone() for name, value in trial.state.items()}
    alone, expected = count_rows(trial, "blocks.2.0", codes)
    assert set(alone) == {5, 7}
    monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    together, found = count_rows(trial, "blocks.2.0", codes)
    assert found == pytest.approx(expected, rel=1e-5)
    assert (max(together) > 7 * 3) == (room > 2000)
    assert all(torch.equal(value, before[name]) for name, value in trial.state.items())


class Scaled(nn.Module):
    """Blocks, a norm, and a head that may be followed by something, in place or not."""

    def __init__(self, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = Blocks(3), nn.LayerNorm(12), nn.Linear(12, 5)
        self.behind = behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.head(self.norm(self.blocks(x))))


@pytest.mark.parametrize(
    ("behind", "passes"),
    [(lambda found: found, 1), (lambda found: 2 * found, 3), (lambda found: found.mul_(2), 3)],
    ids=["nothing", "a product", "a product in place"],
)
def test_a_head_alone_predicts_where_nothing_is_behind_it(
    behind: Callable[[torch.Tensor], torch.Tensor], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies reach it in one pass, and predictions are made for one copy at a time."""
    torch.manual_seed(0)
    model, inputs = Scaled(behind).eval(), seeded(7, 12)
    trial, codes = SingleWeightTrial(model, calibrate(model, [inputs])), rough_codes(model)
    del codes["head.weight"]
    expected = dict(trial.divergences(codes))
    monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    assert dict(trial.divergences(codes)) == pytest.approx(expected, rel=1e-5)
    value = trial._borders[0][-1].value
    assert value is not None
    ran: list[int] = []
    trial.model.register_forward_pre_hook(lambda *_: ran.append(1))
    copies = Border(len(trial._segments) - 1, torch.cat([value, 2 * value, value]))
    found = list(trial._copies.predict(0, copies, bytes_each=1 << 40))
    assert len(ran) == passes
    assert [count for _, count in found] == [1, 1, 1]
    with torch.no_grad():
        wanted = predictions_of(model(inputs)).values
    for each in (0, 2):
        torch.testing.assert_close(found[each][0].values, wanted)
    assert not torch.allclose(found[1][0].values, wanted)


class Turned(nn.Module):
    """A block whose first layer gets time before samples, flat or not, though the second has them in order."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.turned, self.straight, self.flat = nn.Linear(12, 12), nn.Linear(12, 12), flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x.transpose(0, 1)
        rows = inner.flatten(0, 1) if self.flat else inner
        x = x + self.turned(rows).reshape(inner.shape).transpose(0, 1)
        return self.straight(x).relu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("flat", [False, True])
def test_a_layer_whose_rows_are_not_in_the_order_of_samples_is_tried_alone(
    flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    blocks = (Turned(flat) for _ in range(3))
    model, tried = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(72, 5)).eval(), list[str]()
    trial, codes = SingleWeightTrial(model, calibrate(model, seeded(8, 6, 12))), rough_codes(model)
    expected = dict(trial.divergences(codes))
    monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    inner = SideBySide.move_changed

    def noting(
        self: SideBySide, index: int, copies: Border, weights: Mapping[str, Replacement], place: int
    ) -> Border:
        tried.extend(weights)
        return inner(self, index, copies, weights, place)

    monkeypatch.setattr(SideBySide, "move_changed", noting)
    assert dict(trial.divergences(codes)) == pytest.approx(expected, rel=1e-5)
    assert tried == [f"{block}.straight" for block in range(3)]


def test_the_weights_of_a_segment_are_tried_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of four segments: three with weights of their own, and the last."""
    monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(12, 12) for _ in range(8))) for _ in range(3)), nn.Linear(12, 5)
    ).eval()
    trial, codes = SingleWeightTrial(model, calibrate(model, seeded(8, 12))), rough_codes(model)
    del codes["3.weight"]  # the last segment's, tried alone
    assert trial._copies.are_independent()
    passes: list[int] = []
    with hooked(trial.model, after={"0.0": lambda _module, _inputs, output: passes.append(len(output))}):
        found = dict(trial.divergences(codes))
    assert len(found) == len(codes) == 24
    assert passes == [8 * 8]


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Centred(), seeded(8, 12)),
        (TimeFirst(flat=False), seeded(8, 8, 12)),
        (TimeFirst(flat=True), seeded(8, 8, 12)),
        (Blocks(3), seeded(1, 12)),
    ],
    ids=["centred over samples", "time first", "time first, flat", "one sample"],
)
def test_samples_that_may_depend_on_one_another_are_tried_alone(
    model: nn.Module, inputs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, codes = SingleWeightTrial(model.eval(), calibrate(model, inputs)), rough_codes(model)
    expected = dict(trial.divergences(codes))
    monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    assert dict(trial.divergences(codes)) == expected
