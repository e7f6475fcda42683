"""`--set`: every setting of every method, from the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import factorpack as fp
from factorpack.commands.method_options import MethodOptions, known_settings, settings_of, shown
from factorpack.methods import METHODS, ProjectedGradient
from factorpack.tune.images import unlabelled_batches
from tests.commands.running import MODEL, SIDE, failure, ok
from tests.helpers import seeded
from tests.tune.small_net import build, write_images

CHOSEN: dict[str, tuple[dict[str, Any], ...]] = {
    "qspca": (
        {
            "rank": 6,
            "latent_bits": 3,
            "sparsity": 0.25,
            "codebook_bits": 6,
            "tile": 32,
            "latent_scales": "column",
            "center": False,
            "clip": "minmax",
        },
    ),
    "scalar": ({"bits": 3, "clip": "minmax"},),
    "second_order": (
        {
            "step": 0.3,
            "tile": 9,
            "price": 0.05,
            "damping": 0.2,
            "samples": 16,
            "trellis": 8,
            "try_plain": False,
            "row_steps": True,
            "smooth": True,
            "restore_size": True,
            "ridge": 0.5,
            "reorder": False,
        },
        {"bits": 4, "tile": 1},
    ),
    "vq": ({"codewords": 16, "tile": 4, "regime": "large", "iterations": 3, "seed": 2},),
    "bgd": (
        {
            "codewords": 16,
            "tile": 4,
            "regime": "large",
            "gram": "shared",
            "iterations": 3,
            "damping": 0.5,
            "seed": 2,
            "samples": 8,
        },
    ),
    "pqf": (
        {
            "codewords": 16,
            "tile": 4,
            "regime": "large",
            "iterations": 3,
            "heat": 0.5,
            "decay": 0.25,
            "seed": 2,
        },
    ),
    "aq": ({"codebooks": 3, "codewords": 8, "tile": 8, "iterations": 2, "seed": 2},),
    "keep": ({"dtype": "bfloat16"}, {"dtype": None}),
    "lsq": ({"bits": 3, "channels": False},),
    "ttq": ({"threshold": 0.2, "channels": True},),
    "abcnet": ({"bases": 4, "channels": True},),
    "prune": ({"sparsity": 0.5, "bits": 4},),
    "rdoq": ({"step": 0.3, "price": 0.05}, {"qp": -20}),
    "svd": ({"rank": 4, "bits": 6}, {"share": 0.5, "bits": 6}),
    "spatial_svd": ({"rank": 4, "bits": 6}, {"share": 0.5, "bits": 6}),
}
"""For each method, settings that together name every one that it has, but for a solver's."""
SOLVER = {
    "steps": 3,
    "stop": "validation",
    "threshold": "one-shot",
    "sort": "code",
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "samples": 8,
    "validation": 0.25,
    "patience": 1,
}
CASES = [(name, settings) for name, several in CHOSEN.items() for settings in several]


def pairs(settings: dict[str, Any], prefix: str = "") -> list[str]:
    return [f"{prefix}{key}={shown(value)}" for key, value in settings.items()]


def as_options(words: list[str]) -> list[str]:
    return [word for pair in words for word in ("--set", pair)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"conv.weight": seeded(16, 8, 3, 3), "body.weight": seeded(32, 64), "fc.weight": seeded(10, 32)}
    save_file(state, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_every_setting_of_every_method_is_tried() -> None:
    assert set(CHOSEN) == set(METHODS)
    for name, several in CHOSEN.items():
        tried = {key for settings in several for key in settings}
        fields = {field.name for field in dataclasses.fields(METHODS[name]) if field.name != "solver"}  # type: ignore[arg-type]
        assert tried == fields, name
    assert {*SOLVER, "trace"} == {field.name for field in dataclasses.fields(ProjectedGradient)}
    listed = {setting.key for setting in settings_of(METHODS["qspca"])}
    assert listed == {*CHOSEN["qspca"][0], *(f"solver.{key}" for key in SOLVER)}


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_the_same_file_as_in_python(
    name: str, settings: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    packed, expected = tmp_path / "packed.safetensors", tmp_path / "expected.safetensors"
    ok("compress", checkpoint, "-o", packed, "--method", name, *as_options(pairs(settings)))
    method = METHODS[name](**settings)
    assert MethodOptions(name, {}, pairs(settings)).make() == method
    fp.save(fp.compress(checkpoint, method, progress=False), expected)
    assert packed.read_bytes() == expected.read_bytes()


def test_a_solver_and_the_data_it_needs(tmp_path: Path) -> None:
    write_images(tmp_path / "images", 4)
    source, packed = tmp_path / "net.safetensors", tmp_path / "packed.safetensors"
    save_file(build().state_dict(), source)
    settings = ["rank=6", "latent_bits=4", "tile=16", *pairs(SOLVER, "solver.")]
    data = ["--model", MODEL, "--calibration", tmp_path / "images", "--image-size", SIDE]
    ok("compress", source, "-o", packed, *as_options(settings), *data)
    method = fp.QSPCA(6, 4, tile=16, solver=ProjectedGradient(**SOLVER))  # type: ignore[arg-type]
    batches = list(unlabelled_batches(tmp_path / "images", 256, SIDE))
    fp.save(fp.compress(build(), method, calibration=batches, progress=False), tmp_path / "expected")
    assert packed.read_bytes() == (tmp_path / "expected").read_bytes()
    words = ["compress", source, "-o", packed, *as_options(settings)]
    assert "it needs calibration data" in failure(*words)
    assert "--model serves --calibration: give both" in failure(*words, "--model", MODEL)


def test_a_plan_takes_the_same_settings(checkpoint: Path) -> None:
    said = json.loads(ok("plan", checkpoint, "--method", "rdoq", "--set", "qp=-20", "--json"))
    assert said["file_bytes"] == fp.plan(checkpoint, METHODS["rdoq"](qp=-20)).file_bytes


def test_shorthands_are_settings(checkpoint: Path, tmp_path: Path) -> None:
    files = [tmp_path / "short.safetensors", tmp_path / "long.safetensors"]
    ok("compress", checkpoint, "-o", files[0], "--rank", 8, "--latent-bits", 3, "--sparsity", 0.5)
    words = as_options(["rank=8", "latent_bits=3", "sparsity=0.5"])
    ok("compress", checkpoint, "-o", files[1], *words)
    assert files[0].read_bytes() == files[1].read_bytes()


WRONG = {
    ("--set", "step"): "--set is 'step', expected KEY=VALUE, for example bits=4",
    ("--set", "=3"): "--set is '=3', expected KEY=VALUE",
    (
        "--method",
        "scalar",
        "--set",
        "bit=3",
    ): "unknown setting 'bit' for method 'scalar', known are bits=8, clip=mse",
    ("--method", "scalar", "--set", "bits=four"): "bits is 'four', expected a whole number",
    ("--method", "scalar", "--set", "bits=3.0"): "bits is '3.0', expected a whole number",
    ("--method", "scalar", "--set", "clip=max"): "clip is 'max', expected 'mse' or 'minmax'",
    ("--method", "vq", "--set", "tile=wide"): "tile is 'wide', expected a whole number or none",
    ("--method", "ttq", "--set", "channels=maybe"): "channels is 'maybe', expected true or false",
    ("--method", "ttq", "--set", "threshold=x"): "threshold is 'x', expected a number",
    (
        "--set",
        "solver.step=3",
    ): "unknown setting 'solver.step' for method 'qspca', known are rank=256, latent_bits=5,",
    ("--set", "solver=3"): "unknown setting 'solver'",
    ("--set", "solver.trace=print"): "unknown setting 'solver.trace'",
    ("--set", "rank=3", "--rank", 4): "the setting 'rank' is given twice",
    ("--set", "rank=3", "--set", "rank=4"): "the setting 'rank' is given twice",
    ("--method", "gzip", "--set", "level=3"): "unknown method 'gzip', known are qspca, scalar",
    ("--method", "rdoq"): "step",
    ("--ratio", 9, "--set", "rank=3"): "a budget chooses methods and settings itself",
    ("--recipe", "resnet", "--set", "rank=3"): "a recipe states methods and settings itself",
}


@pytest.mark.parametrize("words", WRONG, ids=str)
@pytest.mark.parametrize("command", ["compress", "plan"])
def test_what_is_wrong_is_named(
    command: str, words: tuple[object, ...], checkpoint: Path, tmp_path: Path
) -> None:
    target = ["-o", tmp_path / "x.safetensors"] if command == "compress" else []
    assert WRONG[words] in failure(command, checkpoint, *target, *words)
    assert not (tmp_path / "x.safetensors").exists()


def test_defaults_are_what_a_method_has() -> None:
    for name in METHODS:
        for key, setting in known_settings(name).items():
            if setting.default is not None:
                assert setting.parse(shown(setting.default)) == setting.default, (name, key)
