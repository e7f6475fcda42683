"""`factorpack compare` from a checkpoint and pictures to a table and a figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.tune.small_net import pictures
from tests.tune.test_budget_command import MODEL, wide_net
from tests.tune.test_commands import SIDE, failure, ok


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(wide_net().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        pictures(tmp_path / "data" / split, 6)
    return tmp_path / "data"


def arguments(checkpoint: Path, folder: Path, *more: object) -> list[object]:
    common = ["--model", MODEL, "--methods", "planned, lsq,vq", "--ratios", "4,8", "--image-size", SIDE]
    return ["compare", checkpoint, "-o", folder, *common, "--workers", 0, *more]


def test_a_table_a_json_and_a_figure(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "comparison"
    given = arguments(checkpoint, folder, "--calibration", data / "train", "--data", data)
    said = ok(*given)
    assert "planned to a budget" in said
    document = json.loads((folder / "compare.json").read_text())
    points = document["points"]
    assert [(point["method"], point["asked_ratio"]) for point in points] == [
        (name, ratio) for name in ("planned", "lsq", "vq") for ratio in (4.0, 8.0)
    ]
    assert 0 <= document["original"]["top1"] <= 1
    assert all(0 <= point["measured"]["top1"] <= 1 for point in points if point["file"])
    assert len((folder / "compare.md").read_text().splitlines()) == 2 + len(points)
    assert all((folder / f"compare.{suffix}").stat().st_size > 1000 for suffix in ("png", "svg"))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.packed.safetensors")}
    assert json.loads(ok(*given, "--json")) == document
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*.packed.safetensors")}


def test_without_pictures_sizes_and_weight_errors_alone(checkpoint: Path, tmp_path: Path) -> None:
    document = json.loads(ok(*arguments(checkpoint, tmp_path / "sizes", "--json")))
    assert document["original"] == {}
    assert all(point["measured"] == {} for point in document["points"])
    assert not (tmp_path / "sizes" / "compare.png").exists()


def test_trained_with_one_schedule(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    given = ["--data", data, "--epochs", 1, "--batch-size", 4, "--json"]
    document = json.loads(ok(*arguments(checkpoint, tmp_path / "trained", *given)))
    assert {point["trained"]["epochs"] for point in document["points"]} == {1}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--ratios", "4,many", "expected numbers with commas"),
        ("--methods", "gzip", "unknown method 'gzip'"),
        ("--epochs", 2, "say where they are with --data"),
    ],
)
def test_what_cannot_be_compared(
    checkpoint: Path, tmp_path: Path, option: str, value: object, message: str
) -> None:
    assert message in failure(*arguments(checkpoint, tmp_path / "none", option, value))
