"""`factorpack finetune` on tiny images and a tiny model; the paper's recipes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import factorpack as fp
from factorpack.format.locks import locked
from factorpack.methods.settings import build_settings
from factorpack.planning.families import DEFAULT_METHOD
from factorpack.planning.recipe import read_recipe
from tests.commands.running import failure, invoke, ok, reading
from tests.tune.small_net import build, state_in

RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "paper").glob("*.toml"))
ACCURACY = {"top1", "top5", "samples", "samples_per_s"}

ON_ALL = ["--held-out-share", 0]

RECIPE = """
[default]
method = "qspca"
rank = 6
latent_bits = 4
sparsity = 0.1
tile = 16
solver = { steps = 3, stop = "validation", threshold = "one-shot", samples = 8 }

[finetune]
epochs = 2
learning_rate = 1e-2
held_out_share = 0.0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def test_finetune_trains_a_packed_file(tmp_path: Path, data: Path, packed: Path) -> None:
    output, stored = tmp_path / "tuned.safetensors", packed.read_bytes()
    options = ["-o", output, "--epochs", 2, "--learning-rate", 1e-2, *ON_ALL]
    found = json.loads(ok("finetune", packed, *reading(data), *options, "--json"))
    assert set(found) == {"path", "file_bytes", "file_ratio", "accuracy", "held_out"}
    assert found["held_out"] is None
    assert set(found["accuracy"]) == ACCURACY
    assert found["path"] == str(output)
    assert found["file_bytes"] == output.stat().st_size
    assert found["file_ratio"] == fp.load(output).size().file_ratio
    measured = json.loads(ok("eval", output, *reading(data), "--json"))
    assert found["accuracy"]["top1"] == measured["top1"]
    assert packed.read_bytes() == stored
    assert fp.load(output)["norm.num_batches_tracked"].parts["values"].item() == 2 * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", packed.name, output.name]


def test_finetune_compresses_a_checkpoint_by_its_recipe_first(
    tmp_path: Path, data: Path, plain: Path, recipe: Path
) -> None:
    """The solver is calibrated on the training images; the recipe's settings are the run's."""
    output = tmp_path / "tuned.safetensors"
    ok("finetune", plain, "--recipe", recipe, *reading(data), "-o", output, "--json")
    tuned = fp.load(output)
    assert tuned["body.weight"].kind == "factors"
    assert tuned["body.weight"].bits == {"codebook": 4, "latent": 4}
    assert tuned["body.weight"].extra_zeros == round(0.1 * 6 * 72)
    assert tuned["norm.num_batches_tracked"].parts["values"].item() == 2 * 3
    assert set(tuned) == set(build().state_dict())


@pytest.mark.parametrize(("option", "batches"), [(["--epochs", 1], 3), (["--batch-norm", "frozen"], 0)])
def test_options_count_before_the_recipe(
    tmp_path: Path, data: Path, plain: Path, recipe: Path, option: list[object], batches: int
) -> None:
    output = tmp_path / "tuned.safetensors"
    text = ok("finetune", plain, "--recipe", recipe, *option, "-o", output, *reading(data))
    assert re.search(r"times smaller than FP32, top-1 \d+\.\d\d%, top-5 100\.00% of 6 images", text)
    assert fp.load(output)["norm.num_batches_tracked"].parts["values"].item() == batches


@pytest.mark.parametrize(
    "option", [["--rate", 100.0], ["--target-ratio", 2.8, "--shrink-by", "training"]], ids=str
)
def test_finetune_trains_for_size(tmp_path: Path, data: Path, packed: Path, option: list[object]) -> None:
    """A file this small is mostly header: what can fall falls, and is told as the file's."""
    output = tmp_path / "tuned.safetensors"
    common = ["--epochs", 6, "--learning-rate", 1e-2, "--json", *ON_ALL]
    plain = json.loads(ok("finetune", packed, *reading(data), "-o", output, *common))
    short = json.loads(ok("finetune", packed, *reading(data), "-o", output, *common, *option))
    assert short["file_bytes"] < plain["file_bytes"]
    assert short["file_bytes"] == output.stat().st_size
    if option[0] == "--target-ratio":
        assert short["file_ratio"] >= 2.8


def test_what_happened_on_held_out_images_is_said(
    tmp_path: Path, data: Path, packed: Path, plain: Path
) -> None:
    """A larger file is planned anew from the teacher; no training is better than one that harms."""
    output = tmp_path / "tuned.safetensors"
    common = ["finetune", packed, *reading(data), "-o", output, "--epochs", 2]
    text = ok(*common, "--learning-rate", 1e-2)
    assert re.search(r"\nloss \S+ -> \S+ on 2 held-out inputs, best after epoch [12] of 2\n", text)
    options = ["--teacher", plain, "--target-ratio", 3, "--learning-rate", 5.0, "--json"]
    with pytest.warns(UserWarning, match="training did not help: the start is kept, its divergence"):
        found = json.loads(ok(*common, *options))
    assert found["file_ratio"] >= 3
    assert fp.load(output)["norm.running_var"].kind == "constant"
    held_out = found["held_out"]
    assert (held_out["inputs"], held_out["epoch"], held_out["is_divergence"]) == (2, 0, True)
    assert held_out["end"] == held_out["start"]


def test_without_val_images_there_is_no_accuracy(tmp_path: Path, data: Path, packed: Path) -> None:
    options = [*reading(data / "train"), "-o", tmp_path / "tuned.safetensors", "--epochs", 1, *ON_ALL]
    assert json.loads(ok("finetune", packed, *options, "--json"))["accuracy"] is None
    assert "top-1" not in ok("finetune", packed, *options)


def test_the_same_command_gives_the_same_file(tmp_path: Path, data: Path, plain: Path, recipe: Path) -> None:
    outputs = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for output in outputs:
        ok("finetune", plain, "--recipe", recipe, *reading(data), "-o", output)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_a_teacher_changes_the_run(tmp_path: Path, data: Path, packed: Path, plain: Path) -> None:
    common = ["finetune", packed, *reading(data), "--epochs", 1, "--learning-rate", 1e-2, *ON_ALL]
    ok(*common, "-o", tmp_path / "labels.safetensors")
    ok(*common, "-o", tmp_path / "teacher.safetensors", "--teacher", plain)
    ok(*common, "-o", tmp_path / "none.safetensors", "--teacher", plain, "--teacher-share", 0)
    labels, teacher, none = (
        (tmp_path / f"{name}.safetensors").read_bytes() for name in ("labels", "teacher", "none")
    )
    assert labels == none
    assert labels != teacher


def test_a_run_that_broke_off_goes_on(
    tmp_path: Path, data: Path, plain: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From OUTPUT.checkpoint, or where --checkpoint says; it is gone in the end."""
    common = ["finetune", plain, "--recipe", recipe, *reading(data), "--checkpoint-every", 2]
    ok(*common, "-o", tmp_path / "whole.safetensors")
    tune = fp.finetune

    def breaking(packed: fp.Packed, net: Any, batches: Any, **settings: Any) -> None:
        seen = 0

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            nonlocal seen
            seen += 1
            if seen == 6:
                raise KeyboardInterrupt
            return torch.nn.functional.cross_entropy(logits, labels)

        tune(packed, net, batches, loss=loss, **settings)

    for option in ([], ["--checkpoint", tmp_path / "state"]):
        output = tmp_path / "broken.safetensors"
        state = tmp_path / "state" if option else tmp_path / "broken.safetensors.checkpoint"
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["factorpack.commands.finetune"], "tune", breaking)
            assert invoke(*common, *option, "-o", output).exit_code != 0
        assert state.exists()
        assert not output.exists()
        assert state_in(state)["done"] == 4
        ok(*common, *option, "-o", output)
        assert output.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
        assert not state.exists()
        output.unlink()


def test_what_finetune_refuses(tmp_path: Path, data: Path, packed: Path, plain: Path, recipe: Path) -> None:
    output = ["-o", tmp_path / "tuned.safetensors"]
    common = ["finetune", packed, *reading(data), *output]
    assert "is not a packed file: give a --recipe to compress it by" in failure(
        "finetune", plain, *reading(data), *output
    )
    assert "batch_norm is 'thaw'" in failure(*common, "--batch-norm", "thaw")
    assert "epochs 0" in failure(*common, "--epochs", 0)
    assert "mixed_precision is 'fp4'" in failure(*common, "--mixed-precision", "fp4")
    assert "12 images do not fill a batch of 64" in failure(*common, "--batch-size", 64)
    assert "there is no folder" in failure(
        "finetune", packed, *reading(data), "-o", tmp_path / "missing" / "tuned.safetensors"
    )
    assert "there is no folder" in failure(*common, "--checkpoint", tmp_path / "missing" / "state")
    with locked(tmp_path / "tuned.safetensors.checkpoint"):  # another run's state would be mixed with its own
        assert "is being written by another run" in failure(*common)
    recipe.write_text(RECIPE + "epoch = 3\n")
    message = failure("finetune", plain, *reading(data), *output, "--recipe", recipe)
    assert message.startswith("unknown setting 'epoch' for fine-tuning, known are epochs, learning_rate, ")
    recipe.write_text(RECIPE.replace("1e-2", '"fast"'))
    message = failure("finetune", plain, *reading(data), *output, "--recipe", recipe)
    assert message.startswith("learning_rate is 'fast', a str")
    recipe.write_text("finetune = 3\n")
    assert "finetune is 3, expected a table" in failure(*common, "--recipe", recipe)
    assert not (tmp_path / "tuned.safetensors").exists()


def test_there_are_recipes() -> None:
    assert len(RECIPES) > 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_what_its_name_says(path: Path) -> None:
    """Rank, bits and sparsity are in the name; the rest is the paper's setup."""
    recipe = read_recipe(path, DEFAULT_METHOD)
    schedule = build_settings(fp.Schedule, recipe.finetune, "fine-tuning")
    name = re.fullmatch(r"(resnet18|mobilenet_v2)-rank(\d+)-(\d)bit(?:-sparse(\d+))?", path.stem)
    assert name is not None
    method = recipe.rules.method
    assert isinstance(method, fp.QSPCA)
    assert (method.rank, method.latent_bits) == (int(name[2]), int(name[3]))
    assert method.sparsity == int(name[4] or 0) / 100
    assert (method.tile, method.codebook_bits, method.clip, method.center) == (256, 4, "minmax", True)
    assert method.solver is not None
    assert (method.solver.stop, method.solver.patience) == ("validation", 2)
    assert (method.solver.learning_rate, method.solver.weight_decay) == (1e-4, 1e-5)
    assert (method.solver.samples, method.solver.validation) == (64, 1 / 8)
    assert isinstance(schedule, fp.Schedule)
    assert (schedule.final_share, schedule.weight_decay) == (1e-3, 0.0)
