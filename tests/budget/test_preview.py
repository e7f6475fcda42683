"""A plan is close to what compressing makes, and touches nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import factorpack as fp
from factorpack.budget.excerpt import excerpt_of, measure_a_few
from factorpack.errors import PlanError
from factorpack.format.container import file_header
from factorpack.format.packed_file import file_bytes
from factorpack.methods import METHODS, Method
from factorpack.methods.method import EXCERPT_VALUES
from factorpack.source import open_source
from factorpack.weight import Weight
from tests.helpers import seeded, shared_weights

CLOSE = 0.1
"""How far an estimate may be from the file."""


def real_bytes(tmp_path: Path, source: Path, **choices: Any) -> int:
    fp.save(fp.compress(source, progress=False, **choices), tmp_path / "real.safetensors")
    return (tmp_path / "real.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("name", "method"), [("mobilenet_v2", fp.QSPCA(256, 5)), ("resnet18", fp.Scalar(4))], ids=str
)
def test_the_estimate_is_close_to_the_file_of_a_real_model(tmp_path: Path, name: str, method: Method) -> None:
    source = shared_weights(name)
    planned = fp.plan(source, method)
    real = real_bytes(tmp_path, source, method=method)
    assert planned.file_bytes == pytest.approx(real, rel=CLOSE)
    written = {line.name: line.bytes for line in fp.load(tmp_path / "real.safetensors").size().tensors}
    for line in planned.tensors:
        if written[line.name] > 20_000:
            assert line.bytes == pytest.approx(written[line.name], rel=2 * CLOSE), line.name


METHODS_TRIED: list[Method] = [
    fp.QSPCA(64, 4),
    fp.QSPCA(256, 3, sparsity=0.3),
    fp.QSPCA(64, 4, tile=64, latent_scales="column"),
    fp.Scalar(4),
    fp.methods.RDOQ(step=0.3),
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
def test_every_kind_of_encoding_grows_as_it_should(
    uneven_checkpoint: Path, tmp_path: Path, method: Method
) -> None:
    planned = fp.plan(uneven_checkpoint, method)
    assert planned.file_bytes == pytest.approx(
        real_bytes(tmp_path, uneven_checkpoint, method=method), rel=CLOSE
    )


def test_a_budget_is_shared_out(uneven_checkpoint: Path, tmp_path: Path) -> None:
    planned = fp.plan(uneven_checkpoint, ratio=10)
    real = real_bytes(tmp_path, uneven_checkpoint, ratio=10)
    assert planned.budget_bytes == int(planned.original_bytes / 10)
    assert planned.planner == fp.Planner(trellis=8)
    assert planned.file_bytes == pytest.approx(real, rel=0.02)
    written = {line.name: line.bytes for line in fp.load(tmp_path / "real.safetensors").size().tensors}
    for line in planned.tensors:
        if written[line.name] > 5_000:
            assert line.bytes == pytest.approx(written[line.name], rel=0.3), line.name


def test_the_smallest_size_is_the_one_below_which_compressing_refuses(uneven_checkpoint: Path) -> None:
    smallest = fp.plan(uneven_checkpoint, ratio=10).smallest_bytes
    assert smallest is not None
    fp.plan(uneven_checkpoint, max_bytes=smallest)
    for verb in (fp.plan, fp.compress):
        with pytest.raises(PlanError, match=f"the file would still have {smallest}"):
            verb(uneven_checkpoint, max_bytes=smallest - 1)


def test_a_recipe_is_followed_and_named(uneven_checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('exclude = ["wide.*"]\n[default]\nmethod = "scalar"\nbits = 3\n')
    planned = fp.plan(uneven_checkpoint, recipe=recipe)
    assert planned.recipe == str(recipe)
    notes = {line.name: line.note for line in planned.tensors}
    assert notes["wide.weight"] == "excluded by 'wide.*'"
    assert planned.file_bytes == pytest.approx(
        real_bytes(tmp_path, uneven_checkpoint, recipe=recipe), rel=CLOSE
    )


def test_what_contradicts_itself_is_refused(uneven_checkpoint: Path) -> None:
    for choices in ({"method": fp.Scalar(4), "ratio": 3}, {"ratio": 3, "max_bytes": 4000}):
        with pytest.raises(PlanError, match="give one of"):
            fp.plan(uneven_checkpoint, **choices)  # type: ignore[arg-type]


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


def test_memory_and_seconds_are_about_right(uneven_checkpoint: Path) -> None:
    small, large = fp.plan(uneven_checkpoint, fp.Scalar(4)), fp.plan(uneven_checkpoint, fp.QSPCA(256, 5))
    largest = 4 * 512 * 384
    assert largest < small.compress_peak_bytes < large.compress_peak_bytes < 20 * largest
    assert small.load_peak_bytes > small.original_bytes
    assert 0 < small.seconds < 60


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
    assert planned.header_bytes > len(file_header([], {}))
    assert rows + planned.header_bytes == file_bytes(packed, packed.aliases)
