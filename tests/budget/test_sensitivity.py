"""Sensitivities: Fisher information where it has a closed form, and models of every habit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorpack.batches import evaluating
from factorpack.budget.sensitivity import label_states, measure_information, show
from factorpack.calibration.calibrate import Calibration, calibrate
from factorpack.errors import SourceError
from tests.helpers import seeded


def measured(
    model: nn.Module, batches: Any, layers: list[str], samples: int = 1 << 20, seed: int = 0
) -> dict[str, float]:
    calibration = calibrate(model, batches, samples=1 << 20)
    with evaluating(model):
        found = measure_information(model, calibration, layers, samples, seed)
    return {name: each.level for name, each in found.items()}


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(seeded(*parameter.shape, seed=index))
    return model


def exact(model: nn.Sequential, inputs: Tensor) -> dict[str, float]:
    """E over labels of the squared gradient, in closed form and float64.

    At the logits it is p(1-p); at h = W1 x it is the squared norm of J^T (p - e_y) with J = W2 diag(1-tanh^2),
    averaged over y by its probability.
    """
    first, _, last = (m for m in model.double())
    hidden = first(inputs.double())
    shares = last(hidden.tanh()).softmax(1).detach()
    at_last = (shares * (1 - shares)).mean(1)  # over channels
    slope = (1 - hidden.tanh().square()).detach()
    at_first = torch.zeros(len(inputs), dtype=torch.float64)
    for label in range(shares.shape[1]):
        wrong = shares - nn.functional.one_hot(torch.tensor(label), shares.shape[1])
        gradient = (wrong @ last.weight.detach()) * slope
        at_first += shares[:, label] * gradient.square().mean(1)
    model.float()
    return {"0": float(at_first.mean()), "2": float(at_last.mean())}


def test_it_is_the_fisher_measure_information() -> None:
    """Labels are drawn: twenty thousand of them leave an error of about a percent."""
    model, inputs = two_layers(), seeded(20_000, 6, seed=9)
    found, expected = measured(model, [inputs[:9000], inputs[9000:]], ["0", "2"]), exact(model, inputs)
    for name in ("0", "2"):
        assert found[name] == pytest.approx(expected[name], rel=0.04)


def test_what_linear_layers_show_is_added_up_alike_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU in one look at their gradients."""
    model, calibration = two_layers(), calibrate(two_layers(), [seeded(30, 6), seeded(20, 6, seed=1)])
    expected = measure_information(model, calibration, ["0", "2"])
    monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    found = measure_information(model, calibration, ["0", "2"])
    for name, each in expected.items():
        assert found[name].level == pytest.approx(each.level, rel=1e-5)
        assert found[name].rows is not None
        torch.testing.assert_close(found[name].rows, each.rows)


def test_half_of_it_times_the_error_is_the_divergence() -> None:
    """What the planner takes it for: KL = a/2 * squared error of a channel's output, summed over channels."""
    model, inputs = two_layers(), seeded(8000, 6, seed=9)
    noise = 0.02 * seeded(8000, 8, dtype=torch.float64, seed=10)
    found = measured(model, inputs, ["0"])["0"]
    first, tanh, last = (m for m in model.double())
    with torch.no_grad():
        hidden = first(inputs.double())
        before, after = (last(tanh(h)).log_softmax(1) for h in (hidden, hidden + noise))
    divergence = float((before.exp() * (before - after)).sum(1).mean())
    predicted = found / 2 * float(noise.square().sum(1).mean())
    assert predicted == pytest.approx(divergence, rel=0.1)


def test_positions_are_summed_and_channels_averaged() -> None:
    """A pointwise convolution over a image of n equal pixels has the matrix's gradient, n times over n^2."""
    linear = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(6, 4, 1), linear[1]
            self.conv.weight = nn.Parameter(linear[0].weight.detach()[:, :, None, None])
            self.conv.bias = linear[0].bias

        def forward(self, images: Tensor) -> Tensor:
            return self.head(self.conv(images).mean((2, 3)))  # type: ignore[no-any-return]

    inputs = seeded(50, 6)
    flat = measured(linear, inputs, ["0"])["0"]
    pooled = measured(Pooled(), inputs[:, :, None, None].expand(-1, -1, 3, 5), ["conv"])["conv"]
    assert pooled == pytest.approx(flat / 15, rel=1e-4)


def test_a_layer_that_runs_twice_counts_twice() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    twin = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    for layer in (twin[0], twin[2]):
        layer.load_state_dict(shared.state_dict())
    inputs = seeded(40, 6)
    found, expected = measured(model, inputs, ["0"]), measured(twin, inputs, ["0", "2"])
    assert found["0"] == pytest.approx(expected["0"] + expected["2"], rel=1e-4)


def test_batches_do_not_matter_and_samples_bound_them() -> None:
    model, inputs = two_layers(), seeded(64, 6)
    drawn: list[int] = []
    model.register_forward_pre_hook(lambda _module, arguments: drawn.append(len(arguments[0])))
    calibration = calibrate(model, inputs.split(16))
    drawn.clear()
    measure_information(model, calibration, ["0"], samples=33)
    assert drawn == [16, 16, 16]


@pytest.mark.parametrize("last", [nn.Identity(), nn.Unflatten(1, (5, 1))], ids=["logits", "values"])
def test_batches_in_any_order_draw_the_same_labels(last: nn.Module) -> None:
    """Enough predictions that drawing them takes more than one vector of random numbers."""
    model = nn.Sequential(*two_layers(), last)
    batches = [seeded(size, 6, seed=size) for size in (40, 500, 40, 7)]
    forwards: list[int] = []
    hook = model.register_forward_pre_hook(lambda _module, arguments: forwards.append(len(arguments[0])))
    states = label_states(model, batches)
    hook.remove()
    assert forwards == [40, 500, 7], "once for each shape"
    generator = torch.Generator().manual_seed(0)
    for batch, state in zip(batches, states, strict=True):
        assert torch.equal(generator.get_state(), state)
        show(model, batch, ["0"], generator)


def test_the_same_seed_draws_the_same_labels() -> None:
    model, inputs = two_layers(), seeded(64, 6)
    first, again, other = (measured(model, inputs, ["0"], seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_is_left_alone(frozen: bool) -> None:
    model = two_layers().requires_grad_(not frozen)
    found = measured(model, seeded(64, 6), ["0", "2"])
    assert all(value > 0 for value in found.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad != frozen for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_frozen_or_not_is_the_same() -> None:
    inputs = seeded(64, 6)
    free = measured(two_layers(), inputs, ["0", "2"])
    assert measured(two_layers().requires_grad_(False), inputs, ["0", "2"]) == pytest.approx(free)


def test_gradients_that_are_off_do_not_matter() -> None:
    with torch.no_grad():
        found = measured(two_layers(), seeded(64, 6), ["0"])
    assert found == measured(two_layers(), seeded(64, 6), ["0"])


@pytest.mark.parametrize("frozen", [False, True])
def test_work_in_place_behind_a_layer(frozen: bool) -> None:
    def made(inplace: bool) -> nn.Sequential:
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(inplace), nn.Conv2d(4, 4, 3), nn.ReLU(inplace), nn.Flatten()
        )
        for index, parameter in enumerate(model.parameters()):
            parameter.data.copy_(seeded(*parameter.shape, seed=index))
        return model.requires_grad_(not frozen)

    images = seeded(8, 2, 6, 6)
    assert measured(made(True), images, ["0", "2"]) == measured(made(False), images, ["0", "2"])


class Answering(nn.Module):
    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.answer = two_layers(), answer

    def forward(self, inputs: Tensor) -> Any:
        return self.answer(self.inner(inputs))


def test_logits_by_name() -> None:
    inputs = seeded(32, 6)
    plain = measured(two_layers(), inputs, ["0"])["0"]
    named = measured(Answering(lambda x: SimpleNamespace(logits=x)), inputs, ["inner.0"])
    assert named["inner.0"] == plain


def test_every_token_is_an_answer() -> None:
    """Four tokens with the logits of one, each answered on its own: of one answer, the same information."""
    inputs = seeded(3000, 6)
    plain = measured(two_layers(), inputs, ["0"])["0"]
    model = Answering(lambda x: SimpleNamespace(logits=x[:, None].expand(-1, 4, -1)))
    assert measured(model, inputs, ["inner.0"])["inner.0"] == pytest.approx(plain, rel=0.1)


ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "a image": lambda x: x[:, :, None, None].expand(-1, -1, 2, 2),
    "a tuple": lambda x: (x[:, :, None], None),
    "a dictionary": lambda x: {"depth": x[:, :, None]},
    "a vector": lambda x: x[:, 0],
}


@pytest.mark.parametrize("form", ANSWERS)
def test_answers_that_are_no_logits(form: str) -> None:
    found = measured(Answering(ANSWERS[form]), seeded(64, 6), ["inner.0", "inner.2"])
    assert all(value > 0 for value in found.values())


def test_answers_that_are_no_logits_are_a_gaussian_s_mean() -> None:
    """With the outputs' own standard deviation s, the information at the outputs is 1/s^2."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Unflatten(1, (7, 1)))
    inputs = seeded(4000, 6)
    spread = float(model(inputs).detach().square().mean())
    assert measured(model, inputs, ["0"])["0"] == pytest.approx(1 / spread, rel=0.03)


def test_one_answer_is_no_choice_between_classes() -> None:
    """The softmax of a single number tells nothing: it is a value, like any other that is no logit."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    assert all(value > 0 for value in measured(model, seeded(64, 6), ["0", "2"]).values())


def test_a_layer_the_answer_does_not_need() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            self.idle(inputs)
            return self.used(inputs)  # type: ignore[no-any-return]

    found = measured(Unused(), seeded(16, 6), ["used", "idle"])
    assert found["used"] > 0
    assert found["idle"] == 0.0


def test_no_layers_have_no_sensitivity() -> None:
    assert measured(two_layers(), seeded(8, 6), []) == {}


def test_a_model_that_refuses_gradients_says_so() -> None:
    class NoGradient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = two_layers()

        @torch.no_grad()
        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs)  # type: ignore[no-any-return]

    with pytest.raises(SourceError, match="gradient"):
        measured(NoGradient(), seeded(8, 6), ["inner.0"])


def test_hooks_go_when_the_model_fails() -> None:
    model = two_layers()
    calibration = calibrate(model, seeded(8, 6))
    calibration.batches = [seeded(8, 5)]
    with pytest.raises(RuntimeError):
        measure_information(model, calibration, ["0"])
    assert isinstance(calibration, Calibration)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_embedding_knows_its_whole_measure_information() -> None:
    """For outputs y = W e that are the mean of a Gaussian it is W^T W / s^2, whatever is looked up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6, bias=False), nn.Unflatten(2, (6, 1)))
    tokens = torch.arange(4000).reshape(-1, 1) % 9
    spread = float(model(tokens).detach().square().mean())
    with evaluating(model):
        found = measure_information(model, calibrate(model, [tokens], samples=4000), ["0"], 4000)["0"]
    weight = model.state_dict()["1.weight"]
    assert found.metric is not None
    torch.testing.assert_close(found.metric, weight.T @ weight / spread, rtol=0, atol=0.1 * found.level)
    assert found.level == pytest.approx(float(found.metric.diagonal().mean()), rel=1e-4)
