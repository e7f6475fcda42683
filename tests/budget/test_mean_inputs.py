"""Mean inputs that follow from the norms in front of a layer, against Monte Carlo and against nets that run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget.following_norms import explain_mean, running_means_after
from factorpack.budget.mean_inputs import ACTIVATIONS, explain_means, mean_after
from factorpack.source import open_source
from tests.helpers import assert_close, relative_error, seeded
from tests.test_per_tensor import Here

CHANNELS = 24


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mean_behind_an_activation(activation: str) -> None:
    weight, bias = seeded(6), seeded(6, seed=1)
    drawn = ACTIVATIONS[activation](weight * seeded(200_000, 6, seed=2) + bias).double()
    error = drawn.std(0) / len(drawn) ** 0.5
    assert bool(((mean_after(activation, weight, bias) - drawn.mean(0)).abs() < 4.5 * error).all())


def test_mean_behind_a_relu_in_closed_form() -> None:
    weight, bias = seeded(5).double().abs(), seeded(5, seed=1).double()
    normal = torch.distributions.Normal(0.0, 1.0)
    ratio = bias / weight
    exact = bias * normal.cdf(ratio) + weight * normal.log_prob(ratio).exp()
    assert relative_error(mean_after("relu", weight, bias), exact) < 1e-3


class Shortcut(nn.Module):
    """Two linear blocks whose outputs add up, as in MobileNetV2, and a classifier behind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, CHANNELS, 3, bias=False), nn.BatchNorm2d(CHANNELS)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, bias=False)
        self.bn2 = nn.BatchNorm2d(CHANNELS)
        self.conv3, self.bn3 = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False), nn.BatchNorm2d(CHANNELS)
        self.conv4, self.bn4 = nn.Conv2d(CHANNELS, 4 * CHANNELS, 1, bias=False), nn.BatchNorm2d(4 * CHANNELS)
        self.fc = nn.Linear(4 * CHANNELS, 10)

    def features(self, x: Tensor) -> dict[str, Tensor]:
        """The inputs of the layers behind norms."""
        stem = self.bn1(self.conv1(x)).relu()
        first = self.bn2(self.conv2(stem))
        both = first + self.bn3(self.conv3(first))
        last = self.bn4(self.conv4(both)).relu().mean((2, 3))
        return {"conv2": stem, "conv3": first, "conv4": both, "fc": last}

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x)["fc"])


def trained() -> Shortcut:
    """A net whose norms have seen inputs, and have weights and biases as after training."""
    torch.manual_seed(0)
    net = Shortcut()
    for norm in (net.bn1, net.bn2, net.bn3, net.bn4):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        norm.momentum = None
    with torch.no_grad():
        for seed in range(20):
            net(seeded(16, 3, 12, 12, seed=seed))
    return net.eval()


def mean_inputs(net: Shortcut) -> dict[str, Tensor]:
    with torch.no_grad():
        found = net.features(seeded(256, 3, 12, 12, seed=50))
    return {name: value.mean([d for d in range(value.dim()) if d != 1]) for name, value in found.items()}


def coded_in(source: object) -> list[str]:
    return [name for name, entry in open_source(source).entries.items() if len(entry.shape) > 1]


def test_mean_inputs_are_closer_than_by_the_norm_behind_alone() -> None:
    net = trained()
    source, weights = open_source(net.state_dict()), coded_in(net.state_dict())
    found, truth = explain_means(source, weights), mean_inputs(net)
    assert set(found) == set(weights)
    # The sum of two norms is tried as well as the last: only the sum is what conv4 gets.
    error = relative_error(found["conv4.weight"][1].mean_inputs.float(), truth["conv4"])
    state, mean = net.state_dict(), running_means_after(source, weights)["conv2.weight"]
    alone = explain_mean(state["conv2.weight"], None, state[mean])
    assert alone is not None
    assert error < 0.05
    both = [each.mean_inputs.float() for each in (found["conv2.weight"][1], alone)]
    assert relative_error(both[0], truth["conv2"]) < 0.5 * relative_error(both[1], truth["conv2"])


def test_a_classifier_keeps_its_mean_output_by_its_bias() -> None:
    net = trained()
    kept, explained = explain_means(open_source(net.state_dict()), coded_in(net.state_dict()))["fc.weight"]
    assert kept == "fc.bias"
    assert relative_error(explained.mean_inputs.float(), mean_inputs(net)["fc"]) < 0.15
    changed = net.fc.weight.detach() + 0.1 * seeded(10, 4 * CHANNELS)
    wanted = net.fc.bias.detach() - (changed - net.fc.weight.detach()) @ explained.mean_inputs.float()
    assert_close(explained.with_weight(changed), wanted)


def test_no_norm_is_in_front_where_another_layer_is_between() -> None:
    state = dict(trained().state_dict())
    between = {"fc0.weight": seeded(4 * CHANNELS, 4 * CHANNELS)}
    state = {
        **{k: v for k, v in state.items() if "fc" not in k},
        **between,
        **{k: state[k] for k in state if "fc" in k},
    }
    assert "fc.weight" not in explain_means(open_source(state), coded_in(state))


def test_a_sorted_file_tells_the_same(tmp_path: Path) -> None:
    state = trained().state_dict()
    save_file(state, tmp_path / "net.safetensors")
    found = explain_means(open_source(tmp_path / "net.safetensors"), coded_in(state))
    expected = explain_means(open_source(state), coded_in(state))
    for name in ("conv4.weight", "fc.weight"):
        assert found[name][0] == expected[name][0]
        assert_close(found[name][1].mean_inputs, expected[name][1].mean_inputs)


@pytest.mark.parametrize("engine", [None, Here()])
def test_a_budget_keeps_mean_logits(tmp_path: Path, engine: Here | None) -> None:
    save_file(trained().state_dict(), tmp_path / "net.safetensors")
    inputs, left = seeded(64, 3, 12, 12, seed=60), {}
    with torch.no_grad():
        wanted = trained()(inputs).mean(0)
        for corrects in (False, True):
            planner, out = fp.Planner(correct_means=corrects), tmp_path / f"{corrects}.safetensors"
            settings = {"planner": planner, "engine": engine, "progress": False}
            fp.compress(tmp_path / "net.safetensors", max_bytes=3000, to=out, **settings)
            other = fp.load(out).load_into(trained())
            left[corrects] = (other(inputs).mean(0) - wanted).norm()
    assert left[True] < 0.5 * left[False]
