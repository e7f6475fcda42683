"""Moments of a layer's inputs, against the layer itself and against float64 sums over all positions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from factorpack.record import LayerMoments
from factorpack.solve import moments
from factorpack.solve.moments import MomentAccumulator, has_moments, unfold_inputs
from tests.helpers import assert_close, relative_error, seeded

ALL = 1 << 30
"""More positions than any test has: none are left out."""

CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(7, 5), (6, 7)),
    "linear on sequences": (nn.Linear(7, 5), (2, 4, 7)),
    "1d": (nn.Conv1d(6, 8, 5), (2, 6, 11)),
    "1d strided, dilated": (nn.Conv1d(6, 8, 3, stride=2, padding=2, dilation=2, groups=2), (2, 6, 11)),
    "2d": (nn.Conv2d(3, 4, 3), (2, 3, 7, 6)),
    "2d pointwise": (nn.Conv2d(5, 4, 1), (2, 5, 3, 4)),
    "2d strided": (nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 7, 6)),
    "2d uneven": (nn.Conv2d(3, 4, (3, 2), (2, 1), (1, 0), (1, 3)), (2, 3, 9, 8)),
    "2d dilated": (nn.Conv2d(3, 4, 3, dilation=2, padding=2), (2, 3, 7, 6)),
    "2d same": (nn.Conv2d(3, 4, 4, padding="same"), (2, 3, 7, 6)),
    "2d same, dilated": (nn.Conv2d(3, 4, (2, 3), padding="same", dilation=3), (2, 3, 7, 8)),
    "2d valid": (nn.Conv2d(3, 4, 3, padding="valid"), (2, 3, 7, 6)),
    "2d reflect": (nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect"), (2, 3, 7, 6)),
    "2d replicate": (nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="replicate"), (2, 3, 7, 6)),
    "2d circular": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 7, 6)),
    "2d grouped": (nn.Conv2d(6, 9, 3, padding=1, groups=3), (2, 6, 7, 6)),
    "2d depthwise": (nn.Conv2d(6, 6, 3, stride=2, groups=6), (2, 6, 7, 6)),
    "2d depthwise, two a channel": (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 7, 6)),
    "3d": (nn.Conv3d(2, 4, (2, 3, 3), padding=1, stride=(1, 2, 1)), (2, 2, 4, 5, 6)),
    "3d grouped, dilated": (nn.Conv3d(4, 4, 2, dilation=(1, 2, 1), groups=2), (2, 4, 4, 5, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", CASES)
def test_the_weight_times_the_unfolded_inputs_is_the_layer(case: str) -> None:
    layer, shape = CASES[case]
    layer = layer.double()
    inputs = seeded(*shape, dtype=torch.float64)
    u = unfold_inputs(layer, inputs)
    weight = layer.weight.detach()
    assert isinstance(weight, Tensor)
    groups = getattr(layer, "groups", 1)
    assert u.shape[0] == groups
    assert u.shape[2] == weight[0].numel()
    rows = weight.flatten(1).reshape(groups, -1, u.shape[2])
    channel = -1 if isinstance(layer, nn.Linear) else 1
    expected = (layer(inputs).movedim(channel, -1) - layer.bias).flatten(0, -2)  # (positions, out)
    assert_close((u @ rows.transpose(1, 2)).movedim(0, 1).flatten(1), expected.detach())


def test_which_layers_have_moments() -> None:
    assert all(has_moments(layer) for layer, _ in CASES.values())
    for layer in (nn.ConvTranspose2d(2, 2, 2), nn.Embedding(3, 2), nn.BatchNorm2d(2), nn.LayerNorm(2)):
        assert not has_moments(layer)


def expected_moments(layer: nn.Module, inputs: Tensor, original: Tensor | None = None) -> LayerMoments:
    """In float64, over every position."""
    u = unfold_inputs(layer, inputs.double())
    v = u if original is None else unfold_inputs(layer, original.double())
    count = u.shape[1]
    weight = layer.weight
    assert isinstance(weight, Tensor)
    outputs = v @ weight.detach().double().reshape(len(v), -1, v.shape[2]).transpose(1, 2)
    return LayerMoments(
        u.transpose(1, 2) @ u / count,
        u.mean(1),
        None if original is None else outputs.transpose(1, 2) @ u / count,
        v.mean(1),
    )


def assert_same_moments(found: LayerMoments, expected: LayerMoments) -> None:
    for field in ("second", "mean", "original_mean", "cross"):
        one, other = getattr(found, field), getattr(expected, field)
        assert (one is None) == (other is None), field
        if one is not None:
            assert one.dtype == torch.float32
            assert_close(one, other)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_original", [False, True])
def test_moments_are_those_of_all_positions(case: str, with_original: bool) -> None:
    layer, shape = CASES[case]
    inputs = seeded(*shape) + 0.5
    original = inputs + 0.3 * seeded(*shape, seed=1) if with_original else None
    running = MomentAccumulator(layer, ALL)
    running.add(inputs, original)
    assert_same_moments(running.result(), expected_moments(layer, inputs, original))


@given(cuts=st.lists(st.integers(1, 9), max_size=3, unique=True), with_original=st.booleans())
def test_batch_by_batch_is_all_at_once(cuts: list[int], with_original: bool) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1, groups=2)
    inputs, original = seeded(10, 4, 5, 4), seeded(10, 4, 5, 4, seed=1)
    running = MomentAccumulator(layer, ALL)
    edges = [0, *sorted(cuts), 10]
    for start, stop in itertools.pairwise(edges):
        running.add(inputs[start:stop], original[start:stop] if with_original else None)
    expected = expected_moments(layer, inputs, original if with_original else None)
    assert_same_moments(running.result(), expected)


def test_half_precision_inputs_are_summed_in_full() -> None:
    """300 squares of 100 overflow FP16."""
    running = MomentAccumulator(nn.Linear(2, 2), ALL)
    running.add(torch.full((300, 2), 100.0, dtype=torch.float16))
    assert torch.equal(running.result().second, torch.full((1, 2, 2), 10_000.0))


def test_a_part_of_the_positions_is_close_to_all_of_them() -> None:
    """The error of a mean of m independent positions: 1/sqrt(m), and the estimate spreads better."""
    layer = nn.Conv2d(2, 3, 3, padding=1)
    layer.weight.data = seeded(3, 2, 3, 3, seed=1)
    inputs = seeded(16, 2, 24, 24)
    running = MomentAccumulator(layer, 900)
    running.add(inputs, inputs + 1.0)
    found, expected = running.result(), expected_moments(layer, inputs, inputs + 1.0)
    assert running._rows == 900
    assert found.cross is not None
    assert expected.cross is not None
    # Off-diagonal entries are sampling noise alone: K of them a row, each of size 1/sqrt(m).
    noise = math.sqrt(18 / 900)
    assert relative_error(found.second, expected.second) < 1.5 * noise
    assert relative_error(found.cross, expected.cross) < 2 * noise
    assert relative_error(found.original_mean, expected.original_mean) < 1.5 * noise


@pytest.mark.parametrize("width", [8, 13, 16, 21, 32])
def test_positions_are_drawn_from_everywhere(width: int) -> None:
    """The mean of a row of the image, of a column, of a quarter of the samples: none is left out."""
    layer = nn.Conv2d(3, 1, 1)
    samples = 12
    image = torch.zeros(samples, 3, width, width)
    image[:, 0] = torch.linspace(0, 1, width)[:, None]
    image[:, 1] = torch.linspace(0, 1, width)[None]
    image[:, 2] = torch.linspace(0, 1, samples)[:, None, None]
    running = MomentAccumulator(layer, 400)
    running.add(image)
    assert (running.result().mean - 0.5).abs().max() < 0.02


def test_inputs_and_originals_are_drawn_at_the_same_positions() -> None:
    layer, inputs = nn.Conv2d(2, 3, 3), seeded(4, 2, 20, 20)
    running = MomentAccumulator(layer, 50)
    running.add(inputs, inputs.clone())
    found = running.result()
    assert found.cross is not None
    weight = layer.weight.detach().reshape(1, 3, -1)
    assert_close(found.cross, weight.double() @ found.second.double())
    assert torch.equal(found.original_mean, found.mean)


@pytest.mark.parametrize("size", [70, 200])
def test_large_moments_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(moments, "LARGE", 64)
    rows = seeded(2, 300, size)
    expected = rows.double().transpose(1, 2) @ rows.double()
    assert_close(moments.gram(rows), expected)


@pytest.mark.parametrize("wide", [[5], [40], [5, 7], [40, 9]], ids=str)
def test_layers_with_more_outputs_than_inputs_multiply_by_their_weight_last(wide: list[int]) -> None:
    inputs, original = seeded(90, 12), seeded(90, 12, seed=1)
    layers = [nn.Linear(12, count) for count in wide]
    running = MomentAccumulator(layers[0], ALL, layers[1:])
    for start in (0, 50):
        running.add(inputs[start : start + 50], original[start : start + 50])
    for layer, found in zip(layers, running.results(), strict=True):
        assert_same_moments(found, expected_moments(layer, inputs, original))
