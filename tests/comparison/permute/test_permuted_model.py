"""Permuted models: the same function, names and shapes, whatever the order and the net."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import BUILDERS
from factorpack.comparison.permute import Group, find_groups, permute_model, permuted_model, reorder
from factorpack.errors import PlanError, WeightError
from tests.comparison.permute.nets import BLOCKS, Residual, eventful, random_net
from tests.helpers import assert_same_tensor, relative_error, seeded, shared_weights

IMAGES = seeded(2, 3, 4, 4, dtype=torch.float64)
EXACT = 1e-12


def shuffled(net: nn.Module, groups: tuple[Group, ...], seed: int = 0) -> nn.Module:
    """A copy with every group that may move in a random order."""
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(net)
    free = [group for group in groups if not group.frozen]
    reorder(moved, [(group, torch.randperm(group.size, generator=generator)) for group in free])
    return moved


def answer(net: nn.Module, images: Tensor = IMAGES) -> Tensor:
    with torch.no_grad():
        logits: Tensor = net(images)
    return logits


@settings(max_examples=12)
@given(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=6), st.integers(0, 9))
def test_any_order_of_any_net_leaves_the_function_alone(names: list[str], seed: int) -> None:
    net = random_net(names)
    groups = find_groups(net, IMAGES)
    moved = shuffled(net, groups, seed)
    assert relative_error(answer(moved), answer(net)) < EXACT
    hidden = next(group for group in groups if group.size == 10)
    assert not hidden.frozen
    last = list(net.state_dict())[-2]
    assert not torch.equal(moved.state_dict()[last], net.state_dict()[last])


def test_every_place_of_every_group_is_needed() -> None:
    net = eventful(Residual())
    groups = find_groups(net, IMAGES)
    for group in groups:
        for place in () if group.frozen else group.places:
            broken = replace(group, places=tuple(other for other in group.places if other != place))
            assert relative_error(answer(shuffled(net, (broken,))), answer(net)) > 1e-6, place


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_real_networks_compute_what_they_did(name: str) -> None:
    net = BUILDERS[name]()
    net.load_state_dict(load_file(shared_weights(name)))
    net.double().eval()
    images = seeded(2, 3, 32, 32, dtype=torch.float64)
    groups = find_groups(net, images)
    frozen = {group.frozen for group in groups if group.frozen}
    assert frozen == {"the model's input", "the model's output"}
    moved = shuffled(net, groups)
    assert relative_error(answer(moved, images), answer(net, images)) < 1e-10
    convolutions = [key for key, value in net.state_dict().items() if value.dim() == 4]
    assert not any(torch.equal(moved.state_dict()[key], net.state_dict()[key]) for key in convolutions)


def test_only_values_change_and_only_in_the_copy() -> None:
    net = eventful(Residual())
    before = copy.deepcopy(net.state_dict())
    permuted, report = permute_model(net, IMAGES, iterations=30)
    assert report.change < EXACT
    for name, value in net.state_dict().items():
        assert_same_tensor(value, before[name])
        found = permuted.state_dict()[name]
        assert (found.shape, found.dtype) == (value.shape, value.dtype)
        assert_same_tensor(found.flatten().sort().values, value.flatten().sort().values)
    packed = fp.compress(permuted, fp.Scalar(8), progress=False)
    assert relative_error(answer(packed.load_into(Residual().double().eval())), answer(net)) < 0.05


def test_the_report_says_what_was_searched_and_what_was_left() -> None:
    net = eventful(Residual())
    _, report = permute_model(net, IMAGES, iterations=30)
    searched = {each.children: (each.group.size, each.before >= each.after) for each in report.searched}
    assert searched == {("inner.weight", "hidden.weight"): (8, True)}
    left = {group.places[0].tensor: reason for group, reason in report.left}
    assert left["stem.weight"] == "the model's input"
    assert left["head.weight"] == "the model's output"
    assert left["hidden.weight"] == "no weight has tiles over several of its channels"  # 10 by tiles of 8


def test_a_flattened_image_is_searched_in_tiles_of_several_channels() -> None:
    net = eventful(Residual())
    tiles = {"inner.weight": 4, "hidden.weight": 8, "outer.weight": 6, "head.weight": 5}
    _, report = permute_model(net, IMAGES, iterations=30, tile_of=lambda name, _: tiles.get(name, 0))
    searched = [each.children for each in report.searched]
    assert searched == [("inner.weight", "hidden.weight"), ("outer.weight",), ("head.weight",)]
    assert report.change < EXACT
    _, report = permute_model(net, IMAGES, iterations=0, tile_of=lambda name, _: 4 * (name == "inner.weight"))
    assert [(each.children, each.uncounted) for each in report.searched] == [
        (("inner.weight",), ("hidden.weight",))
    ]


def test_the_same_seed_gives_the_same_model() -> None:
    net = eventful(Residual())
    one, other = (permute_model(net, IMAGES, iterations=30, seed=7)[0].state_dict() for _ in range(2))
    for name, value in one.items():
        assert_same_tensor(other[name], value)


def test_a_wrong_fold_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_norms(net: nn.Module, example: Tensor) -> tuple[Group, ...]:
        groups = find_groups(net, example)
        return tuple(
            replace(group, places=tuple(place for place in group.places if "norm" not in place.tensor))
            for group in groups
        )

    monkeypatch.setattr(permuted_model, "find_groups", without_norms)
    with pytest.raises(WeightError, match="outputs differ by"):
        permute_model(eventful(Residual()), IMAGES, iterations=30)


def test_orders_that_are_none_are_refused() -> None:
    net = eventful(Residual())
    groups = find_groups(net, IMAGES)
    free = next(group for group in groups if not group.frozen)
    frozen = next(group for group in groups if group.frozen)
    with pytest.raises(PlanError, match="the order of 8 is not a permutation of 8 channels"):
        reorder(net, [(free, torch.zeros(8, dtype=torch.int64))])
    with pytest.raises(PlanError, match="may not move: the model's input"):
        reorder(net, [(frozen, torch.arange(frozen.size))])


def test_settings_that_are_none_are_refused() -> None:
    net = eventful(Residual())
    with pytest.raises(PlanError, match="-1 search iterations, expected 0 or more"):
        permute_model(net, IMAGES, iterations=-1)
    with pytest.raises(PlanError, match="tiles of -4 elements for 'inner"):
        permute_model(net, IMAGES, tile_of=lambda *_: -4)
