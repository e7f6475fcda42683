"""`factorpack compress` with a budget: from the weights alone, and from a model and images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import factorpack as fp
from factorpack.calibration.synthetic import Synthetic, make_batches
from factorpack.commands import engines
from factorpack.errors import SourceError
from factorpack.tune.images import unlabelled_batches
from tests.commands.running import SIDE, failure, invoke, ok
from tests.helpers import seeded
from tests.test_per_tensor import Here
from tests.tune.small_net import write_images

MODEL = "tests.commands.test_compress_budget:wide_net"


def wide_net() -> nn.Module:
    """Large enough that a header is small beside its file."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 24, 3),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 128, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 400),
    )  # few columns, since rounding goes column by column
    return net.eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(wide_net().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", 4)
    return tmp_path / "images"


def original_bytes() -> int:
    state = wide_net().state_dict().values()
    return sum(value.numel() * (4 if value.is_floating_point() else 8) for value in state)


def test_a_ratio_from_the_weights_alone(checkpoint: Path, tmp_path: Path) -> None:
    packed = tmp_path / "small.safetensors"
    said = json.loads(ok("compress", checkpoint, "-o", packed, "--ratio", 9, "--json"))
    assert said["file_bytes"] == packed.stat().st_size
    assert 0.99 * original_bytes() / 9 <= packed.stat().st_size <= original_bytes() / 9
    assert "small.safetensors" in ok("compress", checkpoint, "-o", packed, "--max-bytes", 40_000)
    assert 39_600 <= packed.stat().st_size <= 40_000


def test_codes_along_a_trellis(checkpoint: Path, tmp_path: Path) -> None:
    packed = tmp_path / "small.safetensors"
    ok("compress", checkpoint, "-o", packed, "--ratio", 9, "--trellis", 8)
    assert {encoded.trellis for encoded in fp.load(packed).values()} == {0, 8}


def test_images_and_a_model_keep_the_outputs_closer(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    blind, seeing = tmp_path / "blind.safetensors", tmp_path / "seeing.safetensors"
    ok("compress", checkpoint, "-o", blind, "--ratio", 16)
    model = ["--model", MODEL, "--calibration", folder, "--image-size", SIDE]
    ok("compress", checkpoint, "-o", seeing, "--ratio", 16, *model)
    assert seeing.stat().st_size <= original_bytes() / 16
    batches = torch.cat(list(unlabelled_batches(folder, 100, SIDE)))
    with torch.no_grad():
        wanted = wide_net()(batches)
        errors = [
            float((fp.load(file).load_into(wide_net())(batches) - wanted).norm()) for file in (blind, seeing)
        ]
    assert errors[1] < 0.7 * errors[0]


def test_a_killed_command_goes_on(
    checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, expected = tmp_path / "small.safetensors", tmp_path / "whole.safetensors"
    how = ["--ratio", 16, "--model", MODEL, "--calibration", folder, "--image-size", SIDE, "--samples", 3]
    assert "resuming" not in ok("compress", checkpoint, "-o", expected, *how)
    workers = Here()
    with monkeypatch.context() as patched:
        patched.setattr("factorpack.budget.goals.meet_size", None)  # fails once it has planned
        patched.setitem(engines.ENGINES, "local", lambda _: workers)
        assert invoke("compress", checkpoint, "-o", packed, *how, "--engine", "local").exit_code == 1
    assert workers.names == ["batch 0", "batch 1", "0.weight", "3.weight", "7.weight"]
    assert (tmp_path / "small.safetensors.parts").is_dir()
    monkeypatch.setattr("factorpack.budget.measured_curves.plan_together", None)  # planning again would fail
    said = ok("compress", checkpoint, "-o", packed, *how)
    assert "resuming from what" in said
    assert "small.safetensors.parts" in said.replace("\n", "")
    assert packed.read_bytes() == expected.read_bytes()
    assert not (tmp_path / "small.safetensors.parts").exists()


def test_the_smallest_file_within_a_loss(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "small.safetensors"
    model = ["--model", MODEL, "--calibration", folder, "--image-size", SIDE]
    ok("compress", checkpoint, "-o", packed, "--max-loss", 0.01, *model)
    assert packed.stat().st_size < original_bytes() / 2


def test_curves_are_kept_and_used_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, curves = tmp_path / "small.safetensors", tmp_path / "curves.json"
    ok("compress", checkpoint, "-o", packed, "--ratio", 9, "--curves", curves)
    document = json.loads(curves.read_text())["curves"]
    assert set(document) == {name for name, value in wide_net().named_parameters() if value.dim() > 1}
    for curve in document.values():
        assert curve["bytes"] == sorted(curve["bytes"], reverse=True)
    first = packed.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("factorpack.budget.measured_curves.plan_together", None)  # planning again would fail
        ok("compress", checkpoint, "-o", packed, "--ratio", 9, "--curves", curves)
        assert packed.read_bytes() == first
        ok("compress", checkpoint, "-o", packed, "--ratio", 30, "--curves", curves)
        assert packed.stat().st_size <= original_bytes() / 30
    changed = wide_net().state_dict() | {"3.weight": seeded(128, 24, 3, 3)}
    save_file(changed, checkpoint)
    ok("compress", checkpoint, "-o", packed, "--ratio", 9, "--curves", curves)
    assert json.loads(curves.read_text())["curves"]["3.weight"] != document["3.weight"]


def test_a_file_that_holds_no_curves(checkpoint: Path, tmp_path: Path) -> None:
    curves = tmp_path / "curves.json"
    curves.write_text("[1, 2]")
    text = failure("compress", checkpoint, "-o", tmp_path / "x.safetensors", "--ratio", 9, "--curves", curves)
    assert "holds no curves" in text
    assert not (tmp_path / "x.safetensors").exists()


WRONG = {
    ("--ratio", 9, "--rank", 4): "a budget chooses methods and settings itself",
    ("--ratio", 9, "--max-bytes", 9): "give one of --ratio, --max-bytes and --max-loss",
    ("--ratio", 0.5): "ratio is 0.5, expected a number above 1",
    ("--max-bytes", 10): "10 bytes cannot be met: with every weight zero the file would still have",
    ("--model", "a:b"): "serve a budget: give --ratio or --max-bytes",
    ("--ratio", 9, "--calibration", "/nowhere"): "say what makes it with --model",
    ("--ratio", 9, "--calibration", "/nowhere", "--model", MODEL): "there is no folder /nowhere",
    ("--ratio", 9, "--engine", "local", "--model", MODEL): "--engine works on the weights alone",
    ("--rank", 4, "--engine", "local", "--calibration", "/nowhere"): "--engine measures for a budget",
    ("--trellis", 8): "--trellis serve a budget: give --ratio or --max-bytes",
    ("--ratio", 9, "--trellis", 5): "trellis is 5, allowed are 0 and 4 and 8 states",
    ("--max-loss", 0.1): "expected a number above 0, a model, and calibration data",
}


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_what_does_not_go_together(arguments: tuple[object, ...], checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.safetensors"
    assert WRONG[arguments] in failure("compress", checkpoint, "-o", output, *arguments)
    assert not output.exists()


def test_images_are_spread_over_all_there_are(folder: Path, tmp_path: Path) -> None:
    every = torch.cat(list(unlabelled_batches(folder, 1000, SIDE, batch_size=3)))
    few = torch.cat(list(unlabelled_batches(folder, 2, SIDE)))
    assert every.shape[1:] == (3, SIDE, SIDE)
    assert torch.equal(few, every[[0, len(every) // 2]])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="holds no images"):
        list(unlabelled_batches(tmp_path / "empty", 4, SIDE))


def test_synthetic_inputs_and_the_line_about_them(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Synthetic, int]] = []

    def note(model: nn.Module, settings: Synthetic, samples: int, progress: bool) -> list[Any]:
        seen.append((settings, samples))
        return make_batches(model, replace(settings, steps=1), samples, progress)

    monkeypatch.setattr("factorpack.budget.made_inputs.make_batches", note)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "synthetic").mkdir()
    named = ["compress", checkpoint, "-o", tmp_path / "small.safetensors", "--ratio", 8, "--model", MODEL]
    assert "--calibration synthetic makes inputs" in ok(*named)
    made = ok(*named, "--calibration", "synthetic", "--samples", 9, "--image-size", 12, "--length", 7)
    assert "no calibration data" not in made
    assert seen == [(Synthetic(image_size=12, length=7), 9)]
    assert "holds no images" in failure(*named, "--calibration", "./synthetic"), "a folder of that name"
    assert "with --model module:callable" in failure(*named[:-2], "--calibration", "synthetic")
