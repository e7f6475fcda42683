"""Mirrored calibration images: beside their originals, where the model takes them for the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget import knowledge
from factorpack.budget.mirrored import FEW, with_mirrored
from factorpack.calibration.calibrate import Calibration, calibrate
from factorpack.errors import FactorpackError
from tests.helpers import seeded

IMAGES = (16, 3, 8, 8)


class Net(nn.Module):
    """Sees all of an image, or only what is on its left."""

    def __init__(self, sees_sides: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 24, 1), nn.Linear(24, 40)
        self.sees_sides = sees_sides

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images).relu()
        x = x[..., : x.shape[-1] // 2] if self.sees_sides else x
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def _calibrated(net: nn.Module, *batches: Any) -> Calibration:
    return calibrate(net, list(batches), samples=1000)


def _pairs(calibration: Calibration) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in calibration.batches:
        yield from zip(batch[::2], batch[1::2], strict=True)


@pytest.mark.parametrize("sizes", [(16,), (5, 1, 10)])
def test_each_image_is_followed_by_its_mirrored_copy(sizes: tuple[int, ...]) -> None:
    images = seeded(*IMAGES)
    given = _calibrated(Net(False), *images.split(sizes))
    found = with_mirrored(given, Net(False), True)
    pairs = list(_pairs(found))
    assert torch.equal(torch.stack([first for first, _ in pairs]), images)
    assert torch.equal(torch.stack([second for _, second in pairs]), images.flip(-1))
    assert len(found) == 2 * len(given) == 32
    assert max(map(len, found.batches)) <= max(map(len, given.batches)) + 1, "no batch takes more memory"


def test_images_stay_in_their_memory_layout() -> None:
    images = seeded(*IMAGES)
    for batch in with_mirrored(_calibrated(Net(False), images), Net(False), True).batches:
        assert batch.is_contiguous(memory_format=torch.channels_last)  # as calibration put them


def test_the_model_decides_unless_it_is_told() -> None:
    images = seeded(*IMAGES)
    images[..., :4] = 4 * seeded(16, 3, 1, 1, seed=1)  # left and right show different things
    for sees_sides in (False, True):
        net = Net(sees_sides)
        given = _calibrated(net, images)
        assert len(with_mirrored(given, net, None)) == (16 if sees_sides else 32)
        assert len(with_mirrored(given, net, True)) == 32
        assert with_mirrored(given, net, False) is given


def test_with_many_inputs_it_has_to_be_asked_for() -> None:
    net = Net(False)
    for count in (FEW - 1, FEW):
        given = _calibrated(net, seeded(count, 3, 8, 8))
        assert len(with_mirrored(given, net, None)) == (count if count == FEW else 2 * count)
        assert len(with_mirrored(given, net, True)) == 2 * count


@pytest.mark.parametrize(
    "net", [nn.Conv2d(3, 8, 3), nn.Sequential(nn.Flatten(), nn.Linear(192, 9))], ids=["maps", "sides"]
)
def test_models_that_do_not_agree_keep_their_inputs(net: nn.Module) -> None:
    """Maps are mirrored as their images are, and vectors of pixels are others."""
    given = _calibrated(net, seeded(*IMAGES))
    assert with_mirrored(given, net, None) is given


@pytest.mark.parametrize(
    "batch", [seeded(16, 12), torch.arange(24).reshape(1, 2, 3, 4), {"x": seeded(4, 12)}], ids=str
)
@pytest.mark.parametrize("mirror", [None, True])
def test_what_is_no_image_is_not_mirrored(batch: Any, mirror: bool | None) -> None:
    class Anything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.float().reshape(-1, 12))  # type: ignore[no-any-return]

    net = Anything()
    given = _calibrated(net, batch)
    assert with_mirrored(given, net, mirror) is given


@pytest.mark.parametrize(("mirror", "count"), [(None, 32), (True, 32), (False, 16)])
def test_weights_are_coded_on_them(mirror: bool | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = knowledge.Walk

    def walk(inputs: Calibration, *others: Any) -> Any:
        seen.append(len(inputs))
        return real(inputs, *others)

    monkeypatch.setattr(knowledge, "Walk", walk)
    planner = fp.Planner(mirror=mirror, refine=False)
    fp.compress(Net(False), ratio=4, calibration=[seeded(*IMAGES)], planner=planner, progress=False)
    assert set(seen) == {count}


def test_it_is_yes_no_or_open() -> None:
    with pytest.raises(FactorpackError, match="mirror"):
        fp.Planner(mirror=1)  # type: ignore[arg-type]
