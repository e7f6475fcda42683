"""`factorpack bench`: a row for each mode and batch size, beside the model it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import factorpack as fp
from factorpack.commands import app
from factorpack.commands.bench import measure_modes
from factorpack.runtime.apply import MODES, resident_bytes
from tests.tune.small_net import METHOD, build

SMALL = ["--model", "tests.tune.small_net:build", "--shape", "3,14,14", "--batch", "1,3"]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    fp.save(fp.compress(build(), METHOD, progress=False), path)
    return path


def test_every_mode_at_every_batch_size(packed: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(packed), *SMALL, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    rows = json.loads(result.output)["rows"]
    assert [(row["batch"], row["mode"]) for row in rows] == [
        (batch, mode) for batch in (1, 3) for mode in ("original", *MODES)
    ]
    net = build()
    held = {row["mode"]: row["resident_bytes"] for row in rows}
    assert held["original"] == held["dense"] == resident_bytes(net)
    model = build()
    assert held["packed"] == fp.load(packed).apply(model, "packed").resident_bytes < held["dense"]
    originals = {row["batch"]: row["seconds"] for row in rows if row["mode"] == "original"}
    for row in rows:
        assert row["ratio"] == row["seconds"] / originals[row["batch"]]
        assert (row["load_seconds"] is None) == (row["mode"] == "original")
    assert next(row for row in rows if row["mode"] == "packed")["layers"].keys() == {"packed"}


def test_a_table_of_chosen_modes(packed: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(packed), *SMALL, "--modes", "dense,packed"])
    assert result.exit_code == 0, (result.output, result.exception)
    lines = result.output.splitlines()
    assert len(lines) == 1 + 2 * 3
    assert lines[0].split() == ["batch", "mode", "ms", "ratio", "resident", "load,", "s", "layers"]
    assert "packed" in lines[3]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--modes", "dense,fast", "mode 'fast', known are dense, packed, coded, factored, auto"),
        ("--batch", "1,two", "--batch is '1,two', expected whole numbers"),
        ("--batch", "0", "expected numbers of 1 or more"),
        ("--shape", "3,", "--shape is '3,'"),
    ],
)
def test_what_makes_no_sense_is_refused(packed: Path, option: str, value: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", str(packed), *SMALL, option, value])
    assert isinstance(result.exception, fp.PlanError)
    assert message in str(result.exception)


def test_a_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    fp.save(fp.compress(nn.Linear(16, 16), fp.Scalar(4), progress=False), tmp_path / "other.safetensors")
    result = CliRunner().invoke(app, ["bench", str(tmp_path / "other.safetensors"), *SMALL])
    assert isinstance(result.exception, fp.SourceError)


def test_a_second_original_says_what_a_ratio_is_worth(packed: Path) -> None:
    rows = measure_modes(packed, build, [torch.zeros(2, 3, 14, 14)], ["dense"], rounds=2, twin=True)
    assert [row.mode for row in rows] == ["original", "original again", "dense"]
    assert rows[1].ratio == rows[1].seconds / rows[0].seconds
