"""Mean outputs restored from a batch norm's own running mean, where there is no data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import factorpack as fp
from benchmarks.zoo import mobilenet_v2, resnet18
from factorpack.budget import following_norms
from factorpack.budget.following_norms import explain_mean, running_means_after
from factorpack.source import open_source
from tests.helpers import assert_close, relative_error, seeded
from tests.test_per_tensor import Here

KNOWN_INPUTS = seeded(8).abs()


def dense(outputs: int = 32) -> tuple[Tensor, Tensor]:
    """A weight and the running mean of a norm behind it, where the mean inputs are KNOWN_INPUTS."""
    weight = seeded(outputs, 8, 3, 3)
    return weight, weight.sum((2, 3)) @ KNOWN_INPUTS


def test_mean_inputs_are_found() -> None:
    explained = explain_mean(dense()[0], None, dense()[1])
    assert explained is not None
    assert relative_error(explained.mean_inputs.float(), KNOWN_INPUTS) < 0.1


def test_a_changed_weight_keeps_its_normed_mean() -> None:
    weight, mean = dense()
    changed = weight + 0.1 * seeded(*weight.shape, seed=1)
    explained = explain_mean(weight, None, mean)
    assert explained is not None
    wanted = changed.sum((2, 3)) @ KNOWN_INPUTS
    assert relative_error(explained.with_weight(changed), wanted) < 0.1 * relative_error(mean, wanted)


def test_the_same_weight_keeps_its_running_mean() -> None:
    weight, mean = dense()
    explained = explain_mean(weight, None, mean)
    assert explained is not None
    assert_close(explained.with_weight(weight), mean)


def test_a_depthwise_layer() -> None:
    weight = seeded(8, 1, 3, 3).abs()
    explained = explain_mean(weight, None, weight.sum((1, 2, 3)) * KNOWN_INPUTS)
    assert explained is not None
    wanted = 2 * weight.sum((1, 2, 3)) * KNOWN_INPUTS
    assert relative_error(explained.with_weight(2 * weight), wanted) < 0.1


def test_a_bias_is_not_an_input() -> None:
    weight, mean = dense()
    bias = 10 * seeded(len(mean), seed=2)
    explained = explain_mean(weight, bias, mean + bias)
    assert explained is not None
    assert relative_error(explained.mean_inputs.float(), KNOWN_INPUTS) < 0.1
    assert_close(explained.with_weight(weight), mean + bias)


def test_a_mean_that_nothing_explains() -> None:
    """As of a layer with groups, or of a norm behind another layer."""
    assert explain_mean(dense(256)[0], None, seeded(256, seed=3)) is None


def test_a_weight_of_zeros_explains_nothing() -> None:
    assert explain_mean(torch.zeros(4, 2, 1, 1), None, torch.ones(4)) is None


def _pairs(net: nn.Module, folder: Path | None = None) -> dict[str, str]:
    state = net.state_dict()
    if folder is not None:
        save_file(state, folder / "net.safetensors")
    source = open_source(state if folder is None else folder / "net.safetensors")
    weights = [name for name, entry in source.entries.items() if len(entry.shape) > 1]
    found = running_means_after(source, weights)
    return {
        weight.removesuffix(".weight"): mean.removesuffix(".running_mean") for weight, mean in found.items()
    }


def test_norms_of_a_state_dict_and_of_a_sorted_file(tmp_path: Path) -> None:
    for build in (resnet18, mobilenet_v2):
        net = build()
        convolutions = {name for name, module in net.named_modules() if isinstance(module, nn.Conv2d)}
        norms = [name for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)]
        found = _pairs(net)
        assert set(found) == convolutions
        assert sorted(found.values()) == sorted(norms)
        assert _pairs(net, tmp_path) == found
    assert found["features.2.conv.2"] == "features.2.conv.3"
    assert _pairs(resnet18())["layer2.0.downsample.0"] == "layer2.0.downsample.1"


def test_a_norm_in_front_of_a_layer_is_not_behind_it(tmp_path: Path) -> None:
    before = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    assert _pairs(before) == _pairs(before, tmp_path) == {"1": "2"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)


def test_blocks_beyond_the_tenth_of_a_file(tmp_path: Path) -> None:
    """Names of a file are in natural order, which is another than that of plain sorting."""
    net = nn.Sequential(*(Block() for _ in range(11)))
    expected = {f"{block}.conv{n}": f"{block}.bn{n}" for block in range(11) for n in (1, 2)}
    assert _pairs(net) == expected
    assert _pairs(net, tmp_path) == expected


def test_work_grows_with_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    parent = following_norms._parent
    monkeypatch.setattr(following_norms, "_parent", lambda name: looked_at.append(name) or parent(name))
    assert len(_pairs(nn.Sequential(*(Block() for _ in range(50))))) == 100
    assert len(looked_at) == 200  # each weight and each mean once


class Ambiguous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.project = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.bn_a, self.bn_b = nn.BatchNorm2d(4), nn.BatchNorm2d(4)


def test_no_guess_where_two_norms_could_be_meant(tmp_path: Path) -> None:
    assert _pairs(Ambiguous(), tmp_path) == {}


def _trained_norms() -> nn.Module:
    """A net whose norms have seen inputs with a mean."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1))
    for _ in range(60):
        net(1 + 0.3 * torch.randn(8, 8, 8, 8))
    return net.eval()


def test_a_budget_restores_means_without_data(tmp_path: Path) -> None:
    net = _trained_norms()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    inputs = 1 + 0.3 * seeded(64, 8, 8, 8)
    with torch.no_grad():
        wanted = net[:2](inputs).mean((0, 2, 3))
    left = {}
    for corrects in (False, True):
        planner = fp.Planner(correct_means=corrects)
        packed = fp.compress(tmp_path / "net.safetensors", ratio=10, planner=planner, progress=False)
        other = packed.load_into(_trained_norms())
        with torch.no_grad():
            left[corrects] = (other[:2](inputs).mean((0, 2, 3)) - wanted).norm()
    assert left[True] < 0.5 * left[False]


def test_an_engine_corrects_the_same_means(tmp_path: Path) -> None:
    save_file(_trained_norms().state_dict(), tmp_path / "net.safetensors")
    original, found = _trained_norms().state_dict()["1.running_mean"], {}
    for name, engine in {"here": None, "there": Here()}.items():
        out = tmp_path / f"{name}.safetensors"
        fp.compress(tmp_path / "net.safetensors", ratio=10, to=out, engine=engine, progress=False)
        found[name] = fp.load(out).state_dict()["1.running_mean"]
    moved = {name: (mean - original).norm() for name, mean in found.items()}
    assert moved["here"] > 0.01 * original.norm()
    assert (found["there"] - found["here"]).norm() < 0.5 * moved["here"]
