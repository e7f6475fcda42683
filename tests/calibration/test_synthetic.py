"""Calibration inputs made from the model itself: matched statistics, sampled texts, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget import made_inputs
from factorpack.budget.planner import BudgetRequest
from factorpack.budget.tensors import split_tensors
from factorpack.calibration import sampled_texts
from factorpack.calibration.matched_inputs import divergence_from_stored, input_shape, norms_of
from factorpack.calibration.synthetic import Synthetic, make_batches
from factorpack.source import open_source
from tests.helpers import assert_close, assert_same_tensor, seeded

SMALL = Synthetic(image_size=8)


def trained_net() -> nn.Sequential:
    """Its norms have seen images with a mean of 3."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    for norm in (net[1], net[4]):
        norm.momentum = None  # the mean over all batches
    with torch.no_grad():
        for seed in range(4):
            net(3 + 2 * seeded(32, 3, 8, 8, seed=seed))
    return net.eval()


def mismatch(net: nn.Sequential, inputs: Tensor) -> float:
    with torch.no_grad():
        seen = {place: net[:place](inputs) for place in (1, 4)}
        return sum(float(divergence_from_stored(net[place], each)) for place, each in seen.items())  # type: ignore[arg-type]


def test_statistics_of_made_inputs_match_far_better_than_noise() -> None:
    net = trained_net()
    (made,) = make_batches(net, SMALL, 32, progress=False)
    assert made.shape == (32, 3, 8, 8)
    noise = min(mismatch(net, scale * seeded(32, 3, 8, 8)) for scale in (0.5, 1.0, 2.0, 4.0))
    assert mismatch(net, made) < noise / 30


def test_the_divergence_of_two_gaussians() -> None:
    norm = nn.BatchNorm2d(2, eps=0.0).double()
    norm.running_mean, norm.running_var = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.25])
    inputs = seeded(4, 2, 3, 3, dtype=torch.float32)
    rows = inputs.transpose(0, 1).flatten(1).double()
    normal = torch.distributions.Normal
    batch = normal(rows.mean(1), rows.std(1, correction=0))
    stored = normal(norm.running_mean.double(), norm.running_var.double().sqrt())
    expected = torch.distributions.kl_divergence(batch, stored).mean()
    assert_close(divergence_from_stored(norm, inputs), expected.float())


def test_the_same_seed_gives_the_same_inputs() -> None:
    settings = Synthetic(image_size=8, steps=2)
    first, again = (make_batches(trained_net(), settings, 70, progress=False) for _ in range(2))
    assert [len(batch) for batch in first] == [64, 6]
    for batch, other in zip(first, again, strict=True):
        assert_same_tensor(batch, other)
    (other,) = make_batches(trained_net(), Synthetic(image_size=8, steps=2, seed=1), 6, progress=False)
    assert not torch.equal(other, first[1])


def state_of(net: nn.Module) -> list[Any]:
    modules = [
        (each.training, dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in net.modules()
    ]
    return [modules, [(each.requires_grad, each.grad) for each in net.parameters()]]


def test_the_model_is_left_as_it_was() -> None:
    net = trained_net()
    net[1].train()
    net[0].weight.requires_grad_(False)
    before, weights = state_of(net), copy.deepcopy(net.state_dict())
    make_batches(net, Synthetic(image_size=8, steps=2), 4, progress=False)
    with pytest.raises(fp.SourceError, match="synthetic inputs of shape"):
        make_batches(net, Synthetic(image_size=2), 4, progress=False)
    assert state_of(net) == before
    for name, value in net.state_dict().items():
        assert_same_tensor(value, weights[name])


@pytest.mark.parametrize(("strides", "side"), [((2, 2), 16), ((4, 4), 224), ((1, 1), 4)])
def test_an_image_size_nobody_gave(strides: tuple[int, int], side: int) -> None:
    convolutions = [nn.Conv2d(1, 4, 3, strides[0], 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, strides[1], 1)]
    net = nn.Sequential(*convolutions, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(17, 2)).eval()
    assert input_shape(net, norms_of(net), None) == (1, side, side)


def test_vectors_for_a_net_without_convolutions() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    assert [batch.shape for batch in make_batches(net, Synthetic(steps=1), 3, progress=False)] == [(3, 5)]


class Chain(nn.Module):
    """Each token's logits depend on that token alone."""

    def __init__(self, size: int = 5, begin: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(size, size)
        self.config = SimpleNamespace(bos_token_id=begin, max_position_embeddings=400)
        with torch.no_grad():
            self.table.weight.copy_(1.5 * seeded(size, size))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)  # type: ignore[no-any-return]


def test_texts_follow_the_model_s_probabilities() -> None:
    model = Chain(begin=2)
    texts = torch.cat(make_batches(model, Synthetic(length=10_000), 16, progress=False))
    assert texts.shape == (16, 400), "no more than the model has positions"
    assert (texts[:, 0] == 2).all()
    pairs = torch.zeros(5, 5).index_put_(
        (texts[:, :-1].flatten(), texts[:, 1:].flatten()), torch.ones(()), True
    )
    expected = model.table.weight.detach().softmax(1)
    visits = pairs.sum(1, keepdim=True)
    deviations = (pairs / visits - expected) / (expected * (1 - expected) / visits).sqrt()
    assert deviations.abs().max() < 4.5
    assert 0.5 < deviations.square().mean() < 2


def test_texts_of_a_model_without_a_first_token_begin_anywhere() -> None:
    texts = torch.cat(make_batches(Chain(), Synthetic(length=2), 200, progress=False))
    assert texts[:, 0].bincount(minlength=5).min() > 20


def test_kept_states_write_what_reading_all_again_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests.budget.test_journal import language_model

    model, settings = language_model(), Synthetic(length=12)
    (kept,) = make_batches(model, settings, 3, progress=False)
    monkeypatch.setattr(sampled_texts, "_keeps_states", lambda _: False)
    (again,) = make_batches(model, settings, 3, progress=False)
    assert_same_tensor(kept["input_ids"], again["input_ids"])
    assert (kept["input_ids"][:, 0] == model.config.bos_token_id).all()  # type: ignore[union-attr]


class Backwards(Chain):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + super().forward(tokens.flip(1))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Sequential(nn.Linear(4, 4)), "has no batch norm, and it reads no tokens"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
            "has 1 batch norms without running statistics",
        ),
        (Backwards(), "depends on later ones"),
        (nn.Sequential(nn.Embedding(4, 4), nn.Flatten()), "no logits for each token"),
        (nn.Sequential(nn.Embedding(4, 4), nn.Linear(3, 3)), "does not run on tokens alone"),
    ],
)
def test_what_says_nothing_of_its_inputs_is_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(fp.PlanError, match=said) as refusal:
        make_batches(model, Synthetic(), 4, progress=False)
    assert "give calibration data" in str(refusal.value)


def test_settings_and_sources_that_cannot_be() -> None:
    with pytest.raises(fp.PlanError, match="length is 1, expected at least 2"):
        Synthetic(length=1)
    with pytest.raises(fp.SourceError, match="calibration runs a model"):
        fp.compress(trained_net().state_dict(), fp.SecondOrder(bits=4), calibration="synthetic")


def test_a_budget_and_a_method_take_synthetic_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def count(_model: nn.Module, _settings: Synthetic, samples: int, _progress: bool) -> list[Tensor]:
        counts.append(samples)
        return [seeded(samples, 3, 8, 8)]

    monkeypatch.setattr(made_inputs, "make_batches", count)
    monkeypatch.setattr("factorpack.compression.make_batches", count)
    planner = fp.Planner(samples=6)
    fp.compress(trained_net(), max_bytes=6000, calibration="synthetic", planner=planner, progress=False)
    fp.compress(trained_net(), fp.SecondOrder(bits=4, samples=7), calibration="synthetic", progress=False)
    assert counts == [6, 7]


@pytest.mark.parametrize("case", ["images", "texts"])
def test_a_resumed_run_finds_its_inputs(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests.budget.test_journal import language_model

    model = trained_net() if case == "images" else language_model()
    settings = Synthetic(image_size=8, steps=1, length=4)
    request = BudgetRequest(
        open_source(model), model, settings, fp.Planner(samples=9), {}, (), progress=False, parts=tmp_path
    )
    tensors = split_tensors(request)
    made = made_inputs.find_inputs(request, tensors, settings)
    monkeypatch.setattr(made_inputs, "make_batches", None)
    found = made_inputs.find_inputs(request, tensors, settings)
    assert len(found) == len(made)
    for mine, other in zip(found, made, strict=True):
        assert type(mine) is type(other)
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    monkeypatch.setattr(made_inputs, "make_batches", lambda *_: [seeded(1, 3, 8, 8)])
    assert len(made_inputs.find_inputs(request, tensors, Synthetic(seed=5))) == 1, (
        "other settings, other inputs"
    )
