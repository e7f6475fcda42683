"""Calibration: what each layer sees and answers, compared with the same computed by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

import factorpack as fp
from factorpack.batches import evaluating
from factorpack.calibration.calibrate import Calibration, calibrate
from factorpack.decoding import decode
from factorpack.record import LayerMoments, LayerSample
from factorpack.solve.moments import unfold_inputs
from factorpack.solve.projected import FactorProblem
from tests.helpers import assert_close, assert_same_encoded, raw, seeded


class Net(nn.Module):
    """Defined in one order and run in another: stem, body, grouped, head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 24)
        self.grouped = nn.Conv2d(16, 16, 3, groups=2)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.5)
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.stem = nn.Conv2d(3, 16, 3, stride=2)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(seeded(*parameter.shape, seed=index) * 0.3)
            self.norm.running_mean = seeded(16, seed=90)

    def forward(self, images: Tensor, offset: Tensor | None = None) -> Tensor:
        x = self.drop(self.norm(self.body(self.stem(images).relu())))
        x = self.grouped(x).mean((2, 3))
        return self.head(x if offset is None else x + offset)  # type: ignore[no-any-return]


class Texts(nn.Module):
    """One layer over tokens, which takes its arguments by name or as one dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, states: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return self.layer(states)  # type: ignore[no-any-return]


class Pipeline(Texts):
    def forward(self, features: dict[str, Tensor], **_: Any) -> Tensor:  # type: ignore[override]
        return super().forward(**features)


@pytest.mark.parametrize("made", [Texts, Pipeline])
def test_padding_is_no_input(made: type[Texts]) -> None:
    model, states = made(), seeded(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    padded = calibrate(model, [{"states": states, "attention_mask": mask}])
    real = calibrate(model, [{"states": states[mask.bool()]}])
    found, expected = (each.moments(["layer"], model)["layer"] for each in (padded, real))
    assert_close(found.second, expected.second)
    assert_close(found.mean, expected.mean)


LAYERS = ["stem", "body.0", "grouped", "head"]
SOLVER = fp.methods.ProjectedGradient(2, learning_rate=1e-2, samples=8)
METHOD = fp.QSPCA(6, 4, tile=16, solver=SOLVER)
CHOSEN = dict.fromkeys((f"{name}.weight" for name in LAYERS), METHOD)
IMAGES = seeded(8, 3, 9, 9)


def by_hand(net: Net, images: Tensor) -> dict[str, Tensor]:
    """Each layer's input, from functions and not from modules."""
    seen = {"stem": images}
    seen["body.0"] = conv2d(images, net.stem.weight, net.stem.bias, stride=2).relu()
    conv = net.body[0]
    x = conv2d(seen["body.0"], conv.weight, conv.bias, padding=1).relu()  # type: ignore[arg-type]
    norm = net.norm
    assert norm.running_mean is not None
    assert norm.running_var is not None
    columns = [
        each[None, :, None, None] for each in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    ]
    seen["grouped"] = (x - columns[0]) / (columns[1] + norm.eps).sqrt() * columns[2] + columns[3]
    seen["head"] = conv2d(seen["grouped"], net.grouped.weight, net.grouped.bias, groups=2).mean((2, 3))
    return {name: values.detach() for name, values in seen.items()}


def answer(net: Net, name: str, values: Tensor) -> Tensor:
    layer = net.get_submodule(name)
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    if isinstance(layer, nn.Linear):
        return linear(values, layer.weight, layer.bias).detach()
    return conv2d(values, layer.weight, layer.bias, layer.stride, layer.padding, 1, layer.groups).detach()


class Samples:
    """Records the sample every layer's solver is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[LayerSample] = []
        solve = fp.methods.ProjectedGradient.solve

        def recording(
            solver: fp.methods.ProjectedGradient, problem: FactorProblem, sample: LayerSample
        ) -> tuple[Tensor, Tensor]:
            self.seen.append(sample)
            return solve(solver, problem, sample)

        monkeypatch.setattr(fp.methods.ProjectedGradient, "solve", recording)


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Samples:
    return Samples(monkeypatch)


# -- order and activations ---------------------------------------------------------------------------


def test_the_order_is_that_of_execution() -> None:
    found = calibrate(Net(), IMAGES)
    assert found.order == ["stem", "body.0", "norm", "grouped", "head"]


def test_a_layer_that_runs_twice_counts_where_it_runs_first() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), shared, nn.Tanh(), shared, nn.Linear(8, 8))
    calibration = calibrate(model, seeded(4, 8))
    assert calibration.order == ["0", "1", "4"]
    inputs = calibration.sample("1", model, model).inputs
    assert torch.equal(inputs, model[0](seeded(4, 8)).detach())


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_and_outputs_are_those_computed_by_hand(name: str) -> None:
    """Biases are in the outputs; dropout is off and the norm uses its running statistics."""
    net = Net()
    sample = calibrate(net, [IMAGES[:5], IMAGES[5:]]).sample(name, net.eval(), net)
    expected = by_hand(net, IMAGES)[name]
    torch.testing.assert_close(sample.inputs, expected)
    torch.testing.assert_close(sample.outputs, answer(net, name, expected))
    weight = net.get_parameter(f"{name}.weight")
    assert_close(sample.apply(weight, sample.inputs).detach(), sample.outputs)
    bias = net.get_parameter(f"{name}.bias").detach()
    alone = sample.apply(torch.zeros_like(weight), sample.inputs).detach()
    assert torch.equal(alone.movedim(1, -1), bias.expand_as(alone.movedim(1, -1)))


@pytest.mark.parametrize("sequential", [True, False])
def test_layers_see_the_compressed_ones_before_them(samples: Samples, sequential: bool) -> None:
    """Inputs from the network as compressed so far, outputs always from the original."""
    net = Net().eval()
    packed = fp.compress(net, METHOD, layers=CHOSEN, calibration=[IMAGES], sequential=sequential)
    assert len(samples.seen) == len(LAYERS)
    compressed, originals = copy.deepcopy(net), by_hand(net, IMAGES)
    for name, sample in zip(LAYERS, samples.seen, strict=True):
        expected = by_hand(compressed, IMAGES)[name]
        if name != "stem":
            assert not torch.allclose(expected, originals[name], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(sample.inputs, expected if sequential else originals[name])
        torch.testing.assert_close(sample.outputs, answer(net, name, originals[name]))
        compressed.get_parameter(f"{name}.weight").data.copy_(decode(packed[f"{name}.weight"]))


def test_layers_without_a_solver_are_compressed_for_those_behind_them(samples: Samples) -> None:
    net = Net().eval()
    only: dict[str, Any] = {
        "stem.weight": fp.Scalar(2),
        "head.weight": METHOD,
        "grouped.weight": fp.Scalar(3),
    }
    packed = fp.compress(net, fp.Scalar(2), layers=only, calibration=IMAGES)
    compressed = packed.load_into(copy.deepcopy(net))
    assert isinstance(compressed, Net)
    assert len(samples.seen) == 1
    torch.testing.assert_close(samples.seen[0].inputs, by_hand(compressed, IMAGES)[LAYERS[-1]])


def test_the_tensors_keep_the_model_s_order() -> None:
    net = Net()
    packed = fp.compress(net, METHOD, layers=CHOSEN, calibration=IMAGES)
    assert list(packed) == list(net.state_dict())
    assert packed["head.weight"].kind == packed["stem.weight"].kind == "factors"


# -- batches -----------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "one tensor": IMAGES,
    "a list of tensors": [IMAGES[:3], IMAGES[3:]],
    "pairs with labels": [(IMAGES[:3], torch.zeros(3)), (IMAGES[3:], torch.zeros(5))],
    "lists with labels": [[IMAGES, torch.zeros(8)]],
    "dictionaries": [{"images": IMAGES[:6]}, {"images": IMAGES[6:]}],
    "pairs of a dictionary and labels": [({"images": IMAGES}, torch.zeros(8))],
    "a loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, torch.zeros(8)), 3),
    "a generator": iter([IMAGES[:4], IMAGES[4:]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch_gives_the_same(form: str) -> None:
    net = Net().eval()
    calibration = calibrate(net, FORMS[form])
    assert len(calibration) == 8
    sample = calibration.sample("body.0", net, net)
    torch.testing.assert_close(sample.inputs, by_hand(net, IMAGES)["body.0"])


def test_every_argument_of_a_dictionary_is_passed_and_cut() -> None:
    net = Net().eval()
    calibration = calibrate(net, [{"images": IMAGES, "offset": seeded(8, 16)}], samples=5)
    (batch,) = calibration.batches
    assert {name: tuple(values.shape) for name, values in batch.items()} == {
        "images": (5, 3, 9, 9),
        "offset": (5, 16),
    }
    inputs = calibration.sample("head", net, net).inputs
    torch.testing.assert_close(inputs, by_hand(net, IMAGES[:5])["head"] + seeded(8, 16)[:5])


@pytest.mark.parametrize(
    ("sizes", "wanted", "kept"),
    [
        ([8], 8, [8]),
        ([8], 5, [5]),
        ([3, 3, 2], 64, [3, 3, 2]),
        ([3, 3, 2], 4, [3, 1]),
        ([3, 3, 2], 6, [3, 3]),
        ([4, 4], 1, [1]),
    ],
)
def test_samples_bounds_what_is_kept(sizes: list[int], wanted: int, kept: list[int]) -> None:
    calibration = calibrate(Net(), IMAGES.split(sizes), samples=wanted)
    assert [len(batch) for batch in calibration.batches] == kept
    assert len(calibration) == sum(kept)
    assert torch.equal(torch.cat(calibration.batches), IMAGES[: sum(kept)])


def test_no_more_batches_are_drawn_than_needed() -> None:
    drawn = []

    def batches() -> Iterator[Tensor]:
        for index in range(100):
            drawn.append(index)
            yield IMAGES

    assert len(calibrate(Net(), batches(), samples=20)) == 20
    assert drawn == [0, 1, 2]


def test_a_compression_takes_as_many_samples_as_its_solver_wants(samples: Samples) -> None:
    fp.compress(Net(), METHOD, layers=CHOSEN, calibration=[IMAGES] * 3)
    assert [len(sample.inputs) for sample in samples.seen] == [8] * 4


def test_a_calibration_serves_several_compressions() -> None:
    net = Net()
    calibration = calibrate(net, IMAGES)
    first, second = (fp.compress(net, METHOD, layers=CHOSEN, calibration=calibration) for _ in range(2))
    for name in first:
        assert_same_encoded(first[name], second[name])


# -- what stays as it was ----------------------------------------------------------------------------


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    state = {name: raw(values) for name, values in model.state_dict(keep_vars=False).items()}
    modes = {name: module.training for name, module in model.named_modules()}
    gradients = {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()}
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    return state, modes, gradients, hooks


@pytest.mark.parametrize("sequential", [True, False])
def test_compressing_leaves_the_model_alone(sequential: bool) -> None:
    """Weights, batch statistics, each module's mode, gradients and hooks."""
    net = Net().train()
    net.body.eval()
    before = snapshot(net)
    fp.compress(net, METHOD, layers=CHOSEN, calibration=IMAGES, sequential=sequential)
    assert snapshot(net) == before


BAD: dict[str, tuple[Any, str]] = {
    "wrong shape": (
        seeded(4, 5, 9, 9),
        r"fails on a calibration batch of shape \{'inputs': \(4, 5, 9, 9\)\}",
    ),
    "wrong type": (torch.zeros(4, 3, 9, 9, dtype=torch.int64), "fails on a calibration batch of shape"),
    "wrong name": ([{"photos": IMAGES}], r"fails on a calibration batch of shape \{'photos': \(8, 3"),
    "no batches": ([], "the calibration data has no samples"),
    "an empty batch": (IMAGES[:0], "the calibration data has no samples"),
    "a number": (torch.tensor(1.0), "the calibration data has no samples"),
    "a text": (
        ["image.jpg"],
        r"a calibration batch is a str; expected a tensor, an \(inputs, labels\) pair",
    ),
    "a text for the data": (
        "folder",
        "a calibration batch is a str|calibration is 'folder', expected batches",
    ),
    "a lone dictionary": ({"images": IMAGES}, "a calibration batch is a str"),
    "an empty dictionary": ([{}], "a calibration batch is a dict"),
    "no tensors inside": ([{"images": [1, 2]}], "a calibration batch is a dict"),
    "an array": ([IMAGES.numpy()], "a calibration batch is a ndarray"),
}


@pytest.mark.parametrize("case", BAD)
def test_data_the_model_cannot_run_on(case: str) -> None:
    data, message = BAD[case]
    net = Net().train()
    before = snapshot(net)
    with pytest.raises(fp.SourceError, match=message):
        calibrate(net, data)
    with pytest.raises(fp.SourceError, match=message):
        fp.compress(net, METHOD, layers=CHOSEN, calibration=data)
    assert snapshot(net) == before


@pytest.mark.parametrize("samples", [0, -3])
def test_no_samples_asked_for(samples: int) -> None:
    with pytest.raises(fp.SourceError, match=f"{samples} calibration samples, expected at least one"):
        calibrate(Net(), IMAGES, samples=samples)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_activations_that_are_no_numbers(value: float) -> None:
    net = Net().train()
    before = snapshot(net)
    images = IMAGES.clone()
    images[3, 1, 4, 4] = value
    with pytest.raises(fp.SourceError, match="layer 'stem' has NaN or infinity in its input or output"):
        fp.compress(net, METHOD, layers=CHOSEN, calibration=images)
    assert snapshot(net) == before


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, values: Tensor) -> Tensor:
        return self.used(values)  # type: ignore[no-any-return]


def test_a_layer_that_never_runs() -> None:
    net, data = Idle(), seeded(8, 16)
    with pytest.raises(fp.SourceError, match=r"'unused.weight' does not run on the calibration data"):
        fp.compress(net, METHOD, calibration=data)
    with pytest.raises(fp.SourceError, match="layer 'unused' does not run on the calibration data"):
        calibrate(net, data).sample("unused", net, net)
    packed = fp.compress(net, METHOD, layers={"unused.weight": fp.Scalar(4)}, calibration=data)
    assert (packed["used.weight"].kind, packed["unused.weight"].kind) == ("factors", "scalar")


def test_a_layer_that_runs_on_some_batches_only() -> None:
    class Sometimes(Idle):
        def forward(self, values: Tensor) -> Tensor:
            answer: Tensor = self.used(values)
            return self.unused(answer) if len(values) > 2 else answer

    net = Sometimes()
    with pytest.raises(fp.SourceError, match="layer 'unused' does not run on the calibration data"):
        fp.compress(net, METHOD, calibration=[seeded(4, 16), seeded(2, 16)])


def test_a_solver_needs_a_model_and_data() -> None:
    with pytest.raises(fp.PlanError, match="needs calibration data"):
        fp.compress(Net(), METHOD, layers=CHOSEN)
    with pytest.raises(fp.SourceError, match="calibration runs a model, and the source is a"):
        fp.compress(Net().state_dict(), METHOD, calibration=IMAGES)


def test_modes_come_back_after_an_error() -> None:
    net = Net().train()
    net.drop.eval()
    before = snapshot(net)

    def fail() -> None:
        with evaluating(net):
            assert not any(module.training for module in net.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert snapshot(net) == before


def test_the_error_of_a_layer_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Mapping[str, Tensor]:
        raise fp.PlanError("no")

    monkeypatch.setattr(fp.methods.ProjectedGradient, "solve", fail)
    with pytest.raises(fp.PlanError) as caught:
        fp.compress(Net(), METHOD, layers=CHOSEN, calibration=Calibration(Net(), IMAGES))
    assert caught.value.__notes__ == ["while compressing tensor 'stem.weight'"]


def test_a_single_layer_is_a_model_too() -> None:
    layer = nn.Linear(16, 64)
    method = fp.QSPCA(8, 4, tile=16, solver=fp.methods.ProjectedGradient(steps=2, samples=8))
    packed = fp.compress(layer, method, calibration=[seeded(8, 16)], progress=False)
    assert packed["weight"].kind == "factors"


def test_a_model_without_tensors_has_nothing_to_calibrate() -> None:
    with pytest.raises(fp.SourceError, match="no samples"):
        fp.compress(nn.ReLU(), calibration=[], progress=False)
    assert len(fp.compress(nn.ReLU(), calibration=[seeded(2, 2)], progress=False)) == 0


# -- moments -----------------------------------------------------------------------------------------


def moments_by_hand(net: Net, name: str, inputs: Tensor, originals: Tensor | None = None) -> LayerMoments:
    """In float64, from all positions of one batch."""
    layer = net.get_submodule(name)
    u = unfold_inputs(layer, inputs.double())
    v = u if originals is None else unfold_inputs(layer, originals.double())
    outputs = v @ layer.weight.detach().double().reshape(len(v), -1, v.shape[2]).transpose(1, 2)
    cross = None if originals is None else outputs.transpose(1, 2) @ u / u.shape[1]
    return LayerMoments(u.transpose(1, 2) @ u / u.shape[1], u.mean(1), cross, v.mean(1))


def assert_same_moments(found: LayerMoments, expected: LayerMoments) -> None:
    assert_close(found.second, expected.second)
    assert_close(found.mean, expected.mean)
    assert_close(found.original_mean, expected.original_mean)
    assert (found.cross is None) == (expected.cross is None)
    if found.cross is not None and expected.cross is not None:
        assert_close(found.cross, expected.cross)


@pytest.mark.parametrize("names", [[name] for name in LAYERS] + [LAYERS], ids=str)
def test_moments_are_those_of_the_inputs_computed_by_hand(names: list[str]) -> None:
    net = Net().eval()
    found = calibrate(net, [IMAGES[:5], IMAGES[5:]]).moments(names, net)
    assert list(found) == names
    for name in names:
        assert_same_moments(found[name], moments_by_hand(net, name, by_hand(net, IMAGES)[name]))


@pytest.mark.parametrize("names", [["grouped"], LAYERS], ids=str)
def test_moments_of_a_compressed_network_stand_beside_the_original_s(names: list[str]) -> None:
    net, compressed = Net().eval(), Net().eval()
    with torch.no_grad():
        for parameter in compressed.parameters():
            parameter.add_(0.1 * seeded(*parameter.shape, seed=77))
    found = calibrate(net, [IMAGES[:3], IMAGES[3:]]).moments(names, net, compressed)
    for name in names:
        inputs, originals = by_hand(compressed, IMAGES)[name], by_hand(net, IMAGES)[name]
        assert_same_moments(found[name], moments_by_hand(net, name, inputs, originals))


@pytest.mark.parametrize("names", [["1"], ["0", "1", "4"]], ids=str)
def test_moments_of_a_layer_that_runs_twice_are_of_both(names: list[str]) -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), shared, nn.Tanh(), shared, nn.Linear(8, 8))
    inputs = seeded(40, 8)
    first = model[0](inputs).detach()
    both = torch.cat([first, shared(first).detach().tanh()]).double()
    moments = calibrate(model, inputs).moments(names, model)["1"]
    assert_close(moments.second[0], both.T @ both / 80)
    assert_close(moments.mean[0], both.mean(0))


def test_moments_are_of_what_a_layer_saw_and_not_of_what_became_of_it() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, values: Tensor) -> Tensor:
            values = self.first(values)
            values += self.second(values)
            return values.relu_()

    model, inputs = InPlace(), seeded(40, 8)
    calibration = calibrate(model, inputs)
    seen = model.first(inputs).detach().double()
    assert_close(calibration.moments(["first", "second"], model)["second"].second[0], seen.T @ seen / 40)


def test_many_positions_are_drawn_from_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough of all batches together, and never fewer than sixteen an input of the layer."""
    monkeypatch.setitem(Calibration.rows_per_batch.__globals__, "ENOUGH_ROWS", 100)
    net = Net().eval()
    calibration = calibrate(net, IMAGES.split(2))
    assert calibration.rows_per_batch(net, "stem") == 16 * 27 / 4
    monkeypatch.setitem(Calibration.rows_per_batch.__globals__, "ENOUGH_ROWS", 1000)
    assert calibration.rows_per_batch(net, "stem") == 1000 / 4
    assert calibration.rows_per_batch(net, "stem", 0.5) == 1000 / 8
    monkeypatch.setitem(Calibration.rows_per_batch.__globals__, "CHEAP_PRODUCTS", 800 * 27**2)
    assert calibration.rows_per_batch(net, "stem") == 800 / 4


@pytest.mark.parametrize("names", [["used", "unused"], ["unused"]], ids=str)
def test_a_layer_that_never_runs_has_no_moments(names: list[str]) -> None:
    net, data = Idle(), seeded(8, 16)
    with pytest.raises(fp.SourceError, match="layer 'unused' does not run on the calibration data"):
        calibrate(net, data).moments(names, net)


def test_moments_leave_the_model_alone() -> None:
    net = Net().train()
    net.body.eval()
    before = snapshot(net)
    calibration = calibrate(net, IMAGES)
    with evaluating(net):
        calibration.moments(LAYERS, net, copy.deepcopy(net))
    assert snapshot(net) == before


def test_inputs_that_are_no_numbers_have_no_moments() -> None:
    net = Net().eval()
    images = IMAGES.clone()
    images[0, 0, 0, 0] = math.nan
    with pytest.raises(fp.SourceError, match="layer 'stem' has NaN or infinity in its input or output"):
        calibrate(net, images).moments(["stem"], net)


class Overflowing(nn.Module):
    """Its third block divides by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        nn.init.constant_(self.blocks[2].weight, math.inf)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", [["blocks.4"], ["blocks.5", "blocks.3"]], ids=str)
def test_the_first_layer_with_nan_is_named(names: list[str]) -> None:
    """And not the one whose moments were requested."""
    model = Overflowing().eval()
    with pytest.raises(fp.SourceError, match=r"layer 'blocks\.2' has NaN or infinity"):
        calibrate(model, seeded(8, 8)).moments(names, model)


def test_a_budget_names_the_first_layer_with_nan() -> None:
    class Damaged(Overflowing):
        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x) if index != 2 else block(x * math.inf)
            return x

    model = Damaged()
    nn.init.normal_(model.blocks[2].weight)
    with pytest.raises(fp.SourceError, match=r"NaN or infinity .*'blocks\.2'"):
        fp.compress(model, ratio=2, calibration=seeded(32, 8), progress=False)


@pytest.mark.parametrize("inside", [False, True], ids=["tensors only", "the whole call"])
def test_tensors_made_under_inference_mode(inside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    with torch.inference_mode():
        data = [(seeded(20, 16) * 1, torch.zeros(20)), {"input": seeded(20, 16, seed=1) * 1}]
    assert data[0][0].is_inference()  # type: ignore[index]
    plain = [seeded(20, 16), {"input": seeded(20, 16, seed=1)}]
    expected = fp.compress(model, ratio=4, calibration=plain, progress=False)
    with torch.inference_mode(inside):
        found = fp.compress(model, ratio=4, calibration=data, progress=False)
    for name, value in found.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])


def test_a_gpu_without_memory_left_says_what_to_lower() -> None:
    class Large(nn.Linear):
        def forward(self, _x: Tensor) -> Tensor:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(fp.SourceError, match=r"\(4, 3\)\} \(give smaller batches\): CUDA out of memory"):
        calibrate(Large(3, 2), seeded(4, 3))


def test_empty_batches_are_skipped() -> None:
    model, inputs = nn.Linear(3, 2), seeded(7, 3)
    empty = torch.zeros(0, 3)
    found = calibrate(model, [empty, inputs[:4], {"input": empty}, (empty, empty), inputs[4:], empty])
    assert [len(batch) for batch in found.batches] == [4, 3]
    with pytest.raises(fp.SourceError, match="the calibration data has no samples"):
        calibrate(model, [empty, {"input": empty}])


# -- inputs kept aside -------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 1),
    share=st.floats(0, 1),
)
def test_a_split_keeps_every_input_once(sizes: list[int], share: float) -> None:
    model, inputs = nn.Linear(3, 2), seeded(sum(sizes), 3)
    whole = calibrate(model, inputs.split(sizes))
    first, held = whole.split(share)
    assert torch.equal(torch.cat([*first.batches, *held.batches]), inputs)
    assert all(len(batch) for batch in (*first.batches, *held.batches))
    assert len(held) == min(max(round(share * len(whole)), 1), len(whole) - 1)
    assert len(first) + len(held) == len(whole) == sum(sizes)
    assert first.order == held.order == whole.order


def test_a_split_cuts_every_argument_of_a_dictionary() -> None:
    net = Net().eval()
    whole = calibrate(net, [{"images": IMAGES, "offset": seeded(8, 16)}])
    first, held = whole.split(0.25)
    assert [tuple(v.shape) for v in first.batches[0].values()] == [(6, 3, 9, 9), (6, 16)]
    assert torch.equal(held.batches[0]["offset"], seeded(8, 16)[6:])


def test_one_input_cannot_be_split() -> None:
    with pytest.raises(fp.SourceError, match="one calibration sample cannot be split in two"):
        calibrate(nn.Linear(3, 2), seeded(1, 3)).split(0.5)


class Viewing(nn.Module):
    """Reads an image as a vector, which takes channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(16, 2)

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.linear(self.convolution(images).view(len(images), -1))
        return output


def test_images_have_their_channels_last_where_the_model_takes_them() -> None:
    images = seeded(2, 3, 4, 4)
    flat = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    (batch,) = calibrate(flat, [images]).batches
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch, images)
    kept = calibrate(Viewing(), [images])
    assert kept.batches[0].is_contiguous()
    assert kept.order == ["convolution", "linear"]
    (tokens,) = calibrate(nn.Linear(4, 2), [images]).batches
    assert tokens is images or tokens.data_ptr() == images.data_ptr()
