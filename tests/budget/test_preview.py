"""A plan is close to what compressing makes, and touches nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from factorpack import commands as cli
from factorpack.budget.excerpt import excerpt_of, measure_a_few
from factorpack.errors import PlanError
from factorpack.format.container import head_bytes
from factorpack.format.packed_file import file_bytes
from factorpack.methods import METHODS, Method
from factorpack.methods.base import EXCERPT_VALUES
from factorpack.planning.families import FAMILIES, family_text
from factorpack.source import open_source
from factorpack.weight import Weight
from tests.helpers import seeded, shared_weights

CLOSE = 0.1
"""How far an estimate may be from the file."""


def real_bytes(tmp_path: Path, source: Path, **choices: Any) -> int:
    fp.save(fp.compress(source, progress=False, **choices), tmp_path / "real.safetensors")
    return (tmp_path / "real.safetensors").stat().st_size


@pytest.mark.parametrize("method", [fp.QSPCA(256, 5), fp.Scalar(4)])
def test_the_estimate_is_close_to_the_file_of_a_real_model(tmp_path: Path, method: Method) -> None:
    source = shared_weights("resnet18")
    planned = fp.plan(source, method)
    real = real_bytes(tmp_path, source, method=method)
    assert planned.file_bytes == pytest.approx(real, rel=CLOSE)
    written = {line.name: line.bytes for line in fp.load(tmp_path / "real.safetensors").size().tensors}
    for line in planned.tensors:
        if written[line.name] > 20_000:
            assert line.bytes == pytest.approx(written[line.name], rel=2 * CLOSE), line.name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights larger than a sample, whose rows are of unequal size, and what is kept beside them."""
    scale = torch.linspace(0.5, 2, 512)[:, None]
    state = {
        "conv1.weight": seeded(16, 3, 3, 3),
        "conv2.weight": seeded(128, 128, 3, 3, seed=1),
        "wide.weight": scale * seeded(512, 384, seed=2),
        "fc.weight": seeded(40, 512, seed=3),
        "fc.bias": seeded(40),
        "steps": torch.tensor(7),
    }
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "net.safetensors")
    return tmp_path / "in" / "net.safetensors"


METHODS_TRIED: list[Method] = [
    fp.QSPCA(64, 4),
    fp.QSPCA(256, 3, sparsity=0.3),
    fp.QSPCA(64, 4, tile=64, latent_scales="column"),
    fp.Scalar(4),
    fp.methods.NNCodec(step=0.3),
    fp.SecondOrder(bits=4),
    fp.methods.LSQ(3),
    fp.methods.Prune(),
    fp.methods.TTQ(),
    fp.methods.ABCNet(3),
    fp.methods.SVD(share=0.3),
    fp.methods.SVD(rank=24),
    fp.methods.SpatialSVD(share=0.3),
    fp.methods.VQ(64, 8),
    fp.Keep("float16"),
]


@pytest.mark.parametrize("method", METHODS_TRIED, ids=str)
def test_every_kind_of_encoding_grows_as_it_should(checkpoint: Path, tmp_path: Path, method: Method) -> None:
    planned = fp.plan(checkpoint, method)
    assert planned.file_bytes == pytest.approx(real_bytes(tmp_path, checkpoint, method=method), rel=CLOSE)


def test_a_budget_is_shared_out(checkpoint: Path, tmp_path: Path) -> None:
    planned = fp.plan(checkpoint, ratio=10)
    real = real_bytes(tmp_path, checkpoint, ratio=10)
    assert planned.budget_bytes == int(planned.original_bytes / 10)
    assert planned.planner == fp.Planner()
    assert planned.file_bytes == pytest.approx(real, rel=0.02)
    written = {line.name: line.bytes for line in fp.load(tmp_path / "real.safetensors").size().tensors}
    for line in planned.tensors:
        if written[line.name] > 5_000:
            assert line.bytes == pytest.approx(written[line.name], rel=0.3), line.name


def test_the_smallest_size_is_the_one_below_which_compressing_refuses(checkpoint: Path) -> None:
    smallest = fp.plan(checkpoint, ratio=10).smallest_bytes
    assert smallest is not None
    fp.plan(checkpoint, max_bytes=smallest)
    for verb in (fp.plan, fp.compress):
        with pytest.raises(PlanError, match=f"the file would still have {smallest}"):
            verb(checkpoint, max_bytes=smallest - 1)


def test_a_recipe_is_followed_and_named(checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('exclude = ["wide.*"]\n[default]\nmethod = "scalar"\nbits = 3\n')
    planned = fp.plan(checkpoint, recipe=recipe)
    assert planned.recipe == str(recipe)
    notes = {line.name: line.note for line in planned.tensors}
    assert notes["wide.weight"] == "excluded by 'wide.*'"
    assert planned.file_bytes == pytest.approx(real_bytes(tmp_path, checkpoint, recipe=recipe), rel=CLOSE)


def test_what_contradicts_itself_is_refused(checkpoint: Path) -> None:
    for choices in ({"method": fp.Scalar(4), "ratio": 3}, {"ratio": 3, "max_bytes": 4000}):
        with pytest.raises(PlanError, match="give one of"):
            fp.plan(checkpoint, **choices)  # type: ignore[arg-type]


def test_small_tensors_are_encoded_whole(tmp_path: Path) -> None:
    state = {"a.weight": seeded(40, 30), "b.weight": seeded(3, 5), "c": torch.ones(0, 3)}
    packed = fp.compress(state, fp.Scalar(5), progress=False)
    assert fp.plan(state, fp.Scalar(5)).file_bytes == file_bytes(packed, packed.aliases)
    fp.save(packed, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size == file_bytes(packed, packed.aliases)


def test_a_model_of_many_equal_layers_costs_three(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    state = {f"layers.{i}.weight": seeded(300, 300, seed=i) for i in range(9)} | {"head": seeded(4, 4)}
    source = open_source(state)
    measured = measure_a_few(source, dict.fromkeys(state), lambda name: seen.append(name) or name)
    assert seen == ["layers.0.weight", "layers.1.weight", "layers.2.weight", "head"]
    assert set(measured) == set(state)
    monkeypatch.setattr("factorpack.budget.excerpt.SAME_SHAPE", 20)
    everything = fp.plan(state, fp.Scalar(4)).file_bytes
    monkeypatch.undo()
    assert fp.plan(state, fp.Scalar(4)).file_bytes == pytest.approx(everything, rel=0.01)


@pytest.mark.parametrize("shape", [(4096, 64), (3, 90_000), (64, 4096, 1, 1), (1000, 100, 3, 3), (300_000,)])
@pytest.mark.parametrize("method", [fp.Scalar(4), fp.methods.SVD(share=0.5), fp.QSPCA(256, 5)])
def test_samples_are_small(shape: tuple[int, ...], method: Method) -> None:
    weight = torch.zeros(shape)
    excerpt = excerpt_of(Weight(weight), method)
    assert excerpt.weight.numel <= 5 * EXCERPT_VALUES
    assert excerpt.growth == pytest.approx(weight.numel() / excerpt.weight.numel)


def test_memory_and_seconds_are_about_right(checkpoint: Path) -> None:
    small, large = fp.plan(checkpoint, fp.Scalar(4)), fp.plan(checkpoint, fp.QSPCA(256, 5))
    largest = 4 * 512 * 384
    assert largest < small.compress_peak_bytes < large.compress_peak_bytes < 20 * largest
    assert small.load_peak_bytes > small.original_bytes
    assert 0 < small.seconds < 60


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["factorpack", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_a_plan_writes_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(checkpoint.parent)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for choices in ((), ("--ratio", 9), ("--method", "scalar"), ("--bytes", 120_000, "--exclude", "fc.*")):
        assert run(monkeypatch, "plan", checkpoint, *choices) == 0
        assert "times smaller" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_command_says_what_the_verb_does(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", checkpoint, "--method", "scalar", "--bits", 5, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file_bytes"] == fp.plan(checkpoint, fp.Scalar(5)).file_bytes
    assert sum(line["bytes"] for line in said["tensors"]) + said["header_bytes"] == said["file_bytes"]
    assert sum(line["share"] for line in said["tensors"]) < 1
    assert run(monkeypatch, "plan", checkpoint, "--ratio", 10, "--top", 2) == 0
    out = capsys.readouterr().out
    assert "the smallest that is possible" in out
    assert "planner: Planner(" in out
    assert run(monkeypatch, "plan", checkpoint, "--ratio", 10, "--bits", 3) == 2
    assert "a budget chooses methods" in capsys.readouterr().err
    assert run(monkeypatch, "plan", checkpoint, "--ratio", 100_000) == 2
    assert "with every weight zero" in capsys.readouterr().err


RESNET = {
    "conv1.weight": (8, 3, 3, 3),
    "layer1.0.conv1.weight": (8, 8, 3, 3),
    "layer4.0.conv2.weight": (8, 8, 3, 3),
    "fc.weight": (10, 8),
}


def test_a_recipe_is_picked_said_and_overruled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, packed = tmp_path / "net.safetensors", tmp_path / "small.safetensors"
    save_file({name: seeded(*shape) for name, shape in RESNET.items()}, source)
    given = ("compress", source, "-o", packed)
    assert run(monkeypatch, *given) == 0
    assert "recipe resnet: ResNets" in capsys.readouterr().out
    assert fp.load(packed)["conv1.weight"].note.startswith("excluded by")
    assert run(monkeypatch, *given, "--json") == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "resnet"
    by_recipe = packed.read_bytes()
    assert run(monkeypatch, *given, "--recipe", "resnet") == 0
    assert packed.read_bytes() == by_recipe
    for plain in (("--recipe", "none"), ("--method", "qspca")):
        assert run(monkeypatch, *given, *plain) == 0
        assert "recipe resnet" not in capsys.readouterr().out
        fp.save(fp.compress(source, progress=False), tmp_path / "plain.safetensors")
        assert packed.read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    assert run(monkeypatch, *given, "--ratio", 3) == 0
    assert fp.load(packed)["conv1.weight"].kind == "keep"
    assert run(monkeypatch, *given, "--ratio", 3, "--recipe", "none") == 0
    assert fp.load(packed)["conv1.weight"].kind != "keep"
    assert run(monkeypatch, *given, "--recipe", "bert", "--bits", 3) == 2
    assert "a recipe states methods and settings itself" in capsys.readouterr().err


def test_recipes_are_listed_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "recipes") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in FAMILIES)
    assert run(monkeypatch, "recipes", "vit") == 0
    assert capsys.readouterr().out == family_text("vit")
    assert run(monkeypatch, "recipes", "--json") == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)["recipes"]} == set(FAMILIES)
    assert run(monkeypatch, "recipes", "vgg") == 2
    assert "unknown recipe 'vgg'" in capsys.readouterr().err


def test_every_method_that_needs_no_data_is_tried() -> None:
    assert {type(method).name for method in METHODS_TRIED} >= set(METHODS) - {
        "bgd",
        "pqf",
        "aq",
    }  # cousins of vq, and slow


def test_the_header_is_counted_for_the_names_there_are() -> None:
    state = {"a" * 200: seeded(4, 4), "b": seeded(4, 4)}
    packed = fp.compress(state, fp.Scalar(4), progress=False)
    planned = fp.plan(state, fp.Scalar(4))
    rows = planned.file_bytes - planned.header_bytes
    assert planned.header_bytes > len(head_bytes([], {}))
    assert rows + planned.header_bytes == file_bytes(packed, packed.aliases)
