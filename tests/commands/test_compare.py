"""`factorpack compare` from a checkpoint and images to a table and a figure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import save_file

import factorpack as fp
from factorpack.commands import engines
from factorpack.comparison.grid import Grid
from factorpack.comparison.request import Request
from factorpack.engine import Local
from factorpack.errors import PlanError
from factorpack.format.locks import locked
from tests.commands.running import SIDE, failure, ok
from tests.commands.test_compress_budget import MODEL, wide_net
from tests.tune.small_net import write_images


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(wide_net().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        write_images(tmp_path / "data" / split, 6)
    return tmp_path / "data"


def arguments(checkpoint: Path, folder: Path, *more: object) -> list[object]:
    common = ["--model", MODEL, "--methods", "planned, lsq,scalar", "--ratios", "4,8", "--image-size", SIDE]
    return ["compare", checkpoint, "-o", folder, *common, "--workers", 0, *more]


@dataclass(frozen=True)
class Measured:
    """A comparison on images that several tests read, in `home`, and what it printed."""

    home: Path
    said: str

    def arguments(self, folder: Path, *more: object) -> list[object]:
        images = ["--calibration", self.home / "data" / "train", "--data", self.home / "data"]
        return arguments(self.home / "net.safetensors", folder, *images, *more)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    home = tmp_path_factory.mktemp("measured")
    save_file(wide_net().state_dict(), home / "net.safetensors")
    for split in ("train", "val"):
        write_images(home / "data" / split, 6)
    return Measured(home, ok(*Measured(home, "").arguments(home / "alone")))


def test_a_table_a_json_and_a_figure(measured: Measured) -> None:
    folder = measured.home / "alone"
    given = measured.arguments(folder)
    assert "planned to a budget" in measured.said
    document = json.loads((folder / "compare.json").read_text())
    points = document["points"]
    assert [(point["method"], point["asked_ratio"]) for point in points] == [
        (name, ratio) for name in ("planned", "scalar", "lsq") for ratio in (4.0, 8.0)
    ]
    assert 0 <= document["original"]["top1"] <= 1
    assert all(0 <= point["measured"]["top1"] <= 1 for point in points if point["file"])
    assert len((folder / "compare.md").read_text().splitlines()) == 2 + len(points)
    assert all((folder / f"compare.{suffix}").stat().st_size > 1000 for suffix in ("png", "svg"))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.packed.safetensors")}
    assert json.loads(ok(*given, "--json")) == document
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*.packed.safetensors")}


def test_without_images_sizes_and_weight_errors_alone(checkpoint: Path, tmp_path: Path) -> None:
    document = json.loads(ok(*arguments(checkpoint, tmp_path / "sizes", "--json")))
    assert document["original"] == {}
    assert all(point["measured"] == {} for point in document["points"])
    assert not (tmp_path / "sizes" / "compare.png").exists()


def test_trained_with_one_schedule(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    given = ["--data", data, "--epochs", 1, "--batch-size", 4, "--json"]
    document = json.loads(ok(*arguments(checkpoint, tmp_path / "trained", *given)))
    assert {point["trained"]["epochs"] for point in document["points"]} == {1}


def test_workers_of_their_own_make_the_same_points(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.ENGINES, "local", partial(Local, start="fork"))
    ok(*measured.arguments(tmp_path / "spread", "--engine", "local", "--engine-workers", 2))
    found = []
    for folder in (measured.home / "alone", tmp_path / "spread"):
        document = json.loads((folder / "compare.json").read_text())
        for point in document["points"]:
            point.pop("compress_s")
        found.append((document, {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}))
    assert found[0] == found[1]
    assert found[0][1]
    with monkeypatch.context() as patched:
        patched.setattr(Grid, "_compute_point", lambda *_: pytest.fail("a worker has made it"))
        ok(*measured.arguments(tmp_path / "spread"))


def test_one_task_a_method_and_one_a_planned_point(checkpoint: Path, tmp_path: Path) -> None:
    request = Request(checkpoint, MODEL, tmp_path, ["lsq", "planned"], [4.0, 8.0])
    tasks = [(task.name, task.arguments[0].ratios, task.size) for task in request.tasks()]
    assert tasks == [("planned", [4.0], 1), ("planned", [8.0], 1), ("lsq", [4.0, 8.0], 2)]


def test_two_comparisons_do_not_share_a_folder(checkpoint: Path, tmp_path: Path) -> None:
    """The second would put its files under the first's points."""
    folder = tmp_path / "comparison"
    folder.mkdir()
    with locked(folder / "compare.json"):
        assert "is being written by another run" in failure(*arguments(checkpoint, folder))
        with pytest.raises(PlanError, match="is being written by another run"):
            fp.compare(wide_net(), [4.0], folder, methods=["scalar"], progress=False)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--ratios", "4,many", "expected numbers with commas"),
        ("--methods", "gzip", "unknown method 'gzip'"),
        ("--engine", "dask", "unknown engine 'dask'"),
        ("--epochs", 2, "give their folder with --data"),
    ],
)
def test_what_cannot_be_compared(
    checkpoint: Path, tmp_path: Path, option: str, value: object, message: str
) -> None:
    assert message in failure(*arguments(checkpoint, tmp_path / "none", option, value))
