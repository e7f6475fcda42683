"""Views of calibration images: what a layer that sees one vector per image is shown beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget import knowledge
from factorpack.budget.views import (
    SHIFT,
    View,
    mirrored,
    moments_of_views,
    sees_few,
    shifted,
    shifted_down,
    shifted_up_and_mirrored,
    views_of,
)
from factorpack.calibration.calibrate import Calibration, calibrate
from factorpack.record import LayerMoments
from factorpack.solve.moments import MomentAccumulator
from tests.helpers import seeded

BOTH = (shifted_down, shifted_up_and_mirrored)


class Net(nn.Module):
    """A classifier whose head holds most of the weights, or that sees where things are, or whose head is small."""

    def __init__(self, sees_places: bool = False, small_head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 40, 3, padding=1), nn.Linear(40, 8 if small_head else 200)
        self.wide = nn.Conv2d(40, 40, 9, padding=4) if small_head else nn.Identity()
        self.sees_places = sees_places

    def forward(self, images: Tensor) -> Tensor:
        x = self.wide(self.conv(images).relu())
        x = x[..., 0, 0] if self.sees_places else x.mean((2, 3))
        return self.head(x)  # type: ignore[no-any-return]


def images(count: int = 24) -> Tensor:
    return 3 * seeded(count, 3, 1, 1) + seeded(count, 3, 32, 32, seed=1)


def calibrated(net: nn.Module, *batches: Tensor) -> Calibration:
    return calibrate(net, list(batches), samples=1000)


def heads(net: Net, calibration: Calibration) -> dict[str, tuple[View, ...]]:
    return views_of(calibration, net, ["conv", "head"], [each.numel() for each in net.parameters()])


@given(
    down=st.integers(-2, 2), right=st.integers(-2, 2), height=st.integers(16, 50), width=st.integers(16, 50)
)
def test_a_shifted_image_holds_the_same_pixels_elsewhere(
    down: int, right: int, height: int, width: int
) -> None:
    image = seeded(1, 2, height, width)
    found = shifted(image, down, right)
    assert found.shape == image.shape
    y, x = down * (height // SHIFT), right * (width // SHIFT)
    rows = slice(max(y, 0), height + min(y, 0)), slice(max(-y, 0), height + min(-y, 0))
    columns = slice(max(x, 0), width + min(x, 0)), slice(max(-x, 0), width + min(-x, 0))
    assert torch.equal(found[..., rows[0], columns[0]], image[..., rows[1], columns[1]])


def test_views_differ_from_their_images_and_from_one_another() -> None:
    seen = [images(), *(view(images()) for view in (*BOTH, mirrored))]
    assert all(not torch.equal(a, b) for place, a in enumerate(seen) for b in seen[:place])


def test_a_large_head_has_views_where_the_model_takes_them_for_the_same() -> None:
    net = Net()
    assert heads(net, calibrated(net, images())) == {"head": BOTH}
    for other in (Net(sees_places=True), Net(small_head=True)):
        assert heads(other, calibrated(other, images())) == {}


@pytest.mark.parametrize("batch", [seeded(24, 3, 32, 15), seeded(24, 3, 8, 32)], ids=["narrow", "low"])
def test_small_images_have_none(batch: Tensor) -> None:
    net = Net()
    assert heads(net, calibrated(net, batch)) == {}


@pytest.mark.parametrize("adapted", [False, True])
def test_their_moments_join_those_of_the_images(adapted: bool) -> None:
    """As if the views had been among the images."""
    net, other = Net().eval(), Net().eval() if adapted else None
    if other is not None:
        other.conv.weight.data.mul_(1.1)
    parts = images().split([10, 14])
    given_ = calibrated(net, *parts)
    alone = given_.moments(["head"], net, other)["head"]
    found = alone.joined(moments_of_views(BOTH, given_, "head", net, other))
    everything = calibrated(net, *parts, *(view(part) for part in parts for view in BOTH))
    expected = everything.moments(["head"], net, other)["head"]
    assert found.positions == expected.positions == 72
    assert (found.cross is None) == (found.original_power is None) == (not adapted)
    for name in ("second", "mean", "cross", "original_mean", "original_power"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("count", "each", "few"), [(24, 1, True), (400, 1, False), (24, 2, False)])
def test_a_layer_sees_few_where_it_sees_one_vector_for_each_of_few_images(
    count: int, each: int, few: bool
) -> None:
    running = MomentAccumulator(nn.Linear(40, 5), 10**6)
    running.add(seeded(count * each, 40))
    net = Net()
    assert sees_few(running.result(), calibrated(net, images(count))) == few


@pytest.mark.parametrize(("views", "most"), [(True, 72), (False, 24)])
def test_the_head_is_coded_on_them(views: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    inner = knowledge.Knowledge.weight

    def weight(self: knowledge.Knowledge, tensors: Any, name: str, moments: LayerMoments | None) -> Any:
        assert moments is not None
        seen[name] = moments.positions
        return inner(self, tensors, name, moments)

    monkeypatch.setattr(knowledge.Knowledge, "weight", weight)
    planner = fp.Planner(views=views, mirror=False)
    fp.compress(Net().eval(), ratio=5, calibration=[images()], planner=planner, progress=False)
    assert seen["head.weight"] == most
    assert seen["conv.weight"] % 32**2 == 0
