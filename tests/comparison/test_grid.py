"""A whole comparison on a net small enough for a test: every method, real files, resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget.planner import Planner
from factorpack.commands.compare import markdown
from factorpack.comparison import BASELINES, PLANNED, Grid, Point, compare
from factorpack.comparison.figure import pareto, save_figure
from factorpack.errors import PlanError
from factorpack.tune.schedule import Schedule
from tests.helpers import flipped, seeded


class Small(nn.Module):
    """Two convolutions, a norm each, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(32)
        self.third = nn.Conv2d(32, 64, 1, bias=False)
        self.third_norm = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first_norm(self.first(images)).relu()
        hidden = self.second_norm(self.second(hidden)).relu()
        hidden = self.third_norm(self.third(hidden)).relu()
        answer: Tensor = self.fc(hidden.mean((2, 3)))
        return answer


def net() -> Small:
    torch.manual_seed(0)
    model = Small()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.1 * seeded(module.num_features))
            module.running_var.copy_(0.5 + seeded(module.num_features, seed=1).abs())
    return model.eval()


BATCHES = [seeded(16, 3, 8, 8, seed=number) for number in range(3)]


def closeness(model: nn.Module) -> Mapping[str, float]:
    """Share of inputs to which a model gives the original's answer."""
    with torch.no_grad():
        same = [net()(batch).argmax(1) == model(batch).argmax(1) for batch in BATCHES]
    return {"top1": float(torch.cat(same).float().mean())}


def grid(folder: Path, methods: tuple[str, ...] = ("all",), ratios: tuple[float, ...] = (6.0,)) -> Grid:
    planner = Planner(samples=48)
    return Grid(net(), ratios, folder, methods, BATCHES, closeness, planner=planner, progress=False)


def test_every_method_makes_a_file_of_the_size_or_says_its_smallest(tmp_path: Path) -> None:
    points = grid(tmp_path).run()
    assert [point.method for point in points] == [PLANNED, *BASELINES]
    points += grid(tmp_path, (PLANNED,), (3.0,)).run() + grid(tmp_path, ("scalar",), (100.0,)).run()
    assert [point.asked_ratio for point in points if point.file is None] == [100.0]
    for point in points:
        if point.file is None:
            assert "smallest" in point.settings
            continue
        packed = fp.load(tmp_path / point.file)
        assert point.file_bytes == (tmp_path / point.file).stat().st_size
        assert point.file_ratio == packed.size().file_ratio
        assert point.file_ratio > 0.97 * point.asked_ratio, point  # calibrated files may end a little larger
        assert point.measured == closeness(packed.load_into(net()))
        assert 0 < point.weight_error < 1.5
    planned = next(point for point in points if (point.method, point.asked_ratio) == (PLANNED, 3.0))
    assert 0.99 <= 3.0 / planned.file_ratio <= 1.0


def test_a_permuted_file_answers_as_its_codewords_do_and_not_otherwise(tmp_path: Path) -> None:
    """Folding the order into neighbours changes no answer: with many codewords PQF's file is near the original."""
    (point,) = grid(tmp_path, ("pqf",), (2.5,)).run()
    assert point.file
    with torch.no_grad():
        wanted = net()(BATCHES[0])
        found = fp.load(tmp_path / point.file).load_into(net())(BATCHES[0])
    assert float((found - wanted).norm() / wanted.norm()) < 0.3


def test_an_interrupted_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = grid(tmp_path, ("scalar", "lsq")).run()
    monkeypatch.setattr(Grid, "_compute_point", lambda *_: pytest.fail("it was made already"))
    assert grid(tmp_path, ("lsq", "scalar")).run() == first


@pytest.mark.parametrize("text", ["{", "[]", '{"fingerprint": "0"}'])
def test_what_is_no_point_is_not_taken_for_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "scalar-6.json").write_text(text)
    with pytest.raises(PlanError, match=r"scalar-6\.json holds no point"):
        grid(tmp_path, ("scalar",)).run()


def test_damaged_points_are_made_again(tmp_path: Path) -> None:
    """The record of a point, and the packed file that it describes."""
    first = grid(tmp_path, ("scalar",)).run()
    record, packed = tmp_path / "scalar-6.json", tmp_path / "scalar-6.packed.safetensors"
    whole = {path: path.read_bytes() for path in (record, packed)}
    harms = [(path, flipped(content, 5 * len(content))) for path, content in whole.items()]
    for path, harmed in [*harms, (packed, b""), (record, whole[record][:-9])]:
        path.write_bytes(harmed)
        with pytest.warns(UserWarning, match=r"scalar-6\.json is damaged, so scalar at 6x is made again"):
            (point,) = grid(tmp_path, ("scalar",)).run()
        assert replace(point, compress_s=0.0) == replace(first[0], compress_s=0.0)
        assert packed.read_bytes() == whole[packed]
    packed.unlink()
    with pytest.warns(UserWarning, match="No such file"):
        grid(tmp_path, ("scalar",)).run()
    assert packed.read_bytes() == whole[packed]


def test_points_on_other_data_are_not_mixed_in(tmp_path: Path) -> None:
    """As many batches, and other numbers in them; or other images to measure on."""
    grid(tmp_path, ("scalar",)).run()
    same = grid(tmp_path, ("scalar",))
    for other in (replace(same, calibration=[2 * batch for batch in BATCHES]), replace(same, data="others")):
        with pytest.raises(PlanError, match="another model, other data"):
            other.run()


def test_points_of_another_comparison_are_not_mixed_in(tmp_path: Path) -> None:
    grid(tmp_path, ("scalar",)).run()
    other = net()
    with torch.no_grad():
        other.fc.weight.add_(0.1)
    with pytest.raises(PlanError, match="another model"):
        compare(other, [6.0], tmp_path, methods=["scalar"], progress=False)


def test_a_ratio_that_is_none_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="ratio is 0"):
        grid(tmp_path, ratios=(6.0, 0)).run()
    assert not list(tmp_path.iterdir())


def test_all_are_trained_alike(tmp_path: Path) -> None:
    labelled = [(batch, net()(batch).argmax(1)) for batch in BATCHES]
    schedule = Schedule(epochs=2, learning_rate=1e-3, shrink_by="training", held_out_share=0.0)
    methods = (PLANNED, "lsq", "ttq", "vq", "svd")
    trained = Grid(
        net(),
        [5.0],
        tmp_path,
        methods,
        BATCHES,
        closeness,
        train=labelled,
        schedule=schedule,
        planner=Planner(samples=48),
        progress=False,
    ).run()
    for point in trained:
        assert {key: value for key, value in point.trained.items() if key != "target_ratio"} == {
            key: value for key, value in vars_of(schedule).items() if key != "target_ratio"
        }
        assert point.trained["target_ratio"] == (5.0 if point.method == PLANNED else 0.0)
        assert point.file


def vars_of(schedule: Schedule) -> dict[str, object]:
    return {name: getattr(schedule, name) for name in schedule.__slots__}


POINTS = [
    Point(PLANNED, 10.0, "ratio 10", "a", 100, 10.0, 0.1, 1.0, {"top1": 0.7}),
    Point("vq", 10.0, "VQ()", "b", 100, 10.1, 0.2, 1.0, {"top1": 0.5}),
    Point("vq", 20.0, "12.0x is the smallest it makes"),
]


def test_the_table_has_a_row_a_point() -> None:
    lines = markdown(POINTS).splitlines()
    assert lines[2] == "| planned to a budget | 10 | 10.00 | 100 | 0.1000 | 70.00% | 1.0 | ratio 10 |"
    assert lines[4] == "| VQ | 20 | - | - | - | - | - | 12.0x is the smallest it makes |"


def test_the_figure_is_a_image_twice(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    figure = pareto(POINTS, 0.71)
    (axes,) = figure.axes
    assert {line.get_label() for line in axes.get_lines()} >= {"planned to a budget", "VQ"}
    written = save_figure(figure, tmp_path / "compare.png")
    assert [path.suffix for path in written] == [".png", ".svg"]
    assert all(path.stat().st_size > 1000 for path in written)
    again = save_figure(pareto(POINTS, 0.71), tmp_path / "again" / "compare.png")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_a_figure_that_is_not_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pareto(POINTS, 0.71)

    def interrupted(file: Any, **_settings: object) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_figure(figure, tmp_path / "compare.png")
    assert not list(tmp_path.iterdir())


def test_points_are_written_whole(tmp_path: Path) -> None:
    grid(tmp_path, ("scalar",)).run()
    document = json.loads((tmp_path / "scalar-6.json").read_text())
    assert document["method"] == "scalar"
    assert not list(tmp_path.glob("*.tmp*"))
