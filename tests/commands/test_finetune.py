"""`factorpack eval` and `factorpack finetune`, on tiny pictures and a tiny model; the paper's recipes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import factorpack as fp
from factorpack.commands import app
from factorpack.format.locks import locked
from factorpack.methods.settings import build_settings
from factorpack.planning.families import DEFAULT_METHOD
from factorpack.planning.recipe import read_recipe
from factorpack.tune.images import ImageFolder
from tests.tune.small_net import METHOD, SmallNet, build, pictures

MODEL = "tests.tune.small_net:build"
SIDE = 14
RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "paper").glob("*.toml"))
ACCURACY = {"top1", "top5", "samples", "samples_per_s"}

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
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ok(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def failure(*arguments: object) -> str:
    """The message of the error a command ends with."""
    result = run(*arguments)
    assert isinstance(result.exception, fp.FactorpackError), (result.output, result.exception)
    return str(result.exception)


def reading(data: Path, model: str = MODEL) -> list[object]:
    return ["--model", model, "--data", data, "--image-size", SIDE, "--batch-size", 4, "--workers", 0]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    pictures(tmp_path / "data" / "train", 4)
    pictures(tmp_path / "data" / "val", 2)
    return tmp_path / "data"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    fp.save(fp.compress(build(), METHOD), tmp_path / "net.packed.safetensors")
    return tmp_path / "net.packed.safetensors"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    save_file(build().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def accuracy_by_hand(net: SmallNet, folder: Path) -> float:
    images = ImageFolder(folder, SIDE)
    net.eval()
    answers = [int(net(images[index][0][None]).argmax()) for index in range(len(images))]
    return sum(answer == images[index][1] for index, answer in enumerate(answers)) / len(images)


# -- eval --------------------------------------------------------------------------------------------


def test_eval_measures_a_packed_file(data: Path, packed: Path) -> None:
    found = json.loads(ok("eval", packed, *reading(data), "--json"))
    assert set(found) == {"file", "mode", "layers", *ACCURACY}
    net = fp.load(packed).load_into(build())
    assert isinstance(net, SmallNet)
    assert found["file"] == str(packed)
    assert found["samples"] == 6
    assert found["top1"] == accuracy_by_hand(net, data / "val")
    assert found["top5"] == 1.0  # of three classes
    assert found["samples_per_s"] > 0


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_eval_measures_any_checkpoint(tmp_path: Path, data: Path, plain: Path, suffix: str) -> None:
    file = plain
    if suffix == ".pt":
        file = tmp_path / "net.pt"
        torch.save({"state_dict": build().state_dict()}, file)
    found = json.loads(ok("eval", file, *reading(data), "--json"))
    assert found["top1"] == accuracy_by_hand(build(), data / "val")


def test_eval_takes_the_folder_itself_where_it_has_no_val(data: Path, packed: Path) -> None:
    assert json.loads(ok("eval", packed, *reading(data / "train"), "--json"))["samples"] == 12


@pytest.mark.parametrize("mode", ["packed", "factored", "auto"])
def test_eval_in_each_mode(data: Path, packed: Path, mode: str) -> None:
    dense = json.loads(ok("eval", packed, *reading(data), "--json"))
    found = json.loads(ok("eval", packed, *reading(data), "--mode", mode, "--json"))
    assert found["top1"] == dense["top1"]
    assert found["mode"] == mode
    assert set(found["layers"]) == set(dense["layers"])
    assert set(dense["layers"].values()) == {"dense"}
    if mode != "auto":  # a tile of 16 does not divide the filters, so that none is factored
        assert set(found["layers"].values()) == {"packed"}
    lines = ok("eval", packed, *reading(data), "--mode", mode).splitlines()
    assert len(lines) == len(found["layers"]) + 1


def test_eval_refuses_modes_it_does_not_know_or_cannot_use(data: Path, packed: Path, plain: Path) -> None:
    assert "'fast', known are dense" in failure("eval", packed, *reading(data), "--mode", "fast")
    assert "is for packed files" in failure("eval", plain, *reading(data), "--mode", "packed")


def test_eval_in_words(data: Path, packed: Path) -> None:
    """On one line, whatever is in the file's name and however long it is."""
    file = packed.with_name(f"[bold]{'long' * 30}.safetensors")
    packed.rename(file)
    text = ok("eval", file, *reading(data))
    assert text.startswith(f"{file}: top-1 ")
    assert re.search(r"top-1 \d+\.\d\d%, top-5 100\.00% of 6 pictures, \d+ pictures/s\n$", text)


REFERENCES = {
    "nonsense": "does not name a model, expected module:callable",
    ":build": "does not name a model, expected module:callable",
    "tests.tune.small_net:": "does not name a model, expected module:callable",
    "no_such_module:build": "there is no 'no_such_module:build'",
    "tests.tune.small_net:missing": "there is no 'tests.tune.small_net:missing'",
    "tests.tune.small_net:WORDS": "gives a str, expected a torch module",
}


@pytest.mark.parametrize("reference", REFERENCES)
def test_an_unknown_model(tmp_path: Path, data: Path, packed: Path, reference: str) -> None:
    message = REFERENCES[reference]
    assert message in failure("eval", packed, *reading(data, reference))
    assert message in failure("finetune", packed, *reading(data, reference), "-o", tmp_path / "out")


def test_files_that_do_not_fit(tmp_path: Path, data: Path) -> None:
    fp.save(fp.compress({"weight": torch.ones(8, 8)}), tmp_path / "other.packed.safetensors")
    save_file({"weight": torch.ones(8, 8)}, tmp_path / "other.safetensors")
    assert "the model lacks ['weight']" in failure(
        "eval", tmp_path / "other.packed.safetensors", *reading(data)
    )
    message = failure("eval", tmp_path / "other.safetensors", *reading(data))
    assert "other.safetensors does not fit the model" in message


# -- finetune ----------------------------------------------------------------------------------------


def test_finetune_trains_a_packed_file(tmp_path: Path, data: Path, packed: Path) -> None:
    output, stored = tmp_path / "tuned.safetensors", packed.read_bytes()
    options = ["-o", output, "--epochs", 2, "--learning-rate", 1e-2]
    found = json.loads(ok("finetune", packed, *reading(data), *options, "--json"))
    assert set(found) == {"path", "file_bytes", "file_ratio", "accuracy"}
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
    """The solver is calibrated on the training pictures; the recipe's settings are the run's."""
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
    assert re.search(r"times smaller than FP32, top-1 \d+\.\d\d%, top-5 100\.00% of 6 pictures", text)
    assert fp.load(output)["norm.num_batches_tracked"].parts["values"].item() == batches


@pytest.mark.parametrize("option", [["--rate", 100.0], ["--target-ratio", 1.6]], ids=str)
def test_finetune_trains_for_size(tmp_path: Path, data: Path, packed: Path, option: list[object]) -> None:
    """A file this small is mostly header: what can fall falls, and is told as the file's."""
    output, common = tmp_path / "tuned.safetensors", ["--epochs", 6, "--learning-rate", 1e-2, "--json"]
    plain = json.loads(ok("finetune", packed, *reading(data), "-o", output, *common))
    short = json.loads(ok("finetune", packed, *reading(data), "-o", output, *common, *option))
    assert short["file_bytes"] < plain["file_bytes"]
    assert short["file_bytes"] == output.stat().st_size
    if option[0] == "--target-ratio":
        assert short["file_ratio"] >= 1.6


def test_without_val_pictures_there_is_no_accuracy(tmp_path: Path, data: Path, packed: Path) -> None:
    options = [*reading(data / "train"), "-o", tmp_path / "tuned.safetensors", "--epochs", 1]
    assert json.loads(ok("finetune", packed, *options, "--json"))["accuracy"] is None
    assert "top-1" not in ok("finetune", packed, *options)


def test_the_same_command_gives_the_same_file(tmp_path: Path, data: Path, plain: Path, recipe: Path) -> None:
    outputs = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    for output in outputs:
        ok("finetune", plain, "--recipe", recipe, *reading(data), "-o", output)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_a_teacher_changes_the_run(tmp_path: Path, data: Path, packed: Path, plain: Path) -> None:
    common = ["finetune", packed, *reading(data), "--epochs", 1, "--learning-rate", 1e-2]
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
            assert run(*common, *option, "-o", output).exit_code != 0
        assert state.exists()
        assert not output.exists()
        assert torch.load(state, weights_only=True)["done"] == 4
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
    assert "12 pictures do not fill a batch of 64" in failure(*common, "--batch-size", 64)
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


# -- the paper's recipes -----------------------------------------------------------------------------


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


def test_a_damaged_packed_file_is_called_damaged(tmp_path: Path) -> None:
    """And not taken for a checkpoint."""
    path, data = tmp_path / "x.safetensors", tmp_path / "data"
    pictures(data, 2)
    fp.save(fp.compress(build(), progress=False), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    common = ("--model", MODEL, "--data", data, "--image-size", SIDE, "--batch-size", 2, "--workers", 0)
    assert "checksum" in failure("eval", path, *common)
    assert "checksum" in failure("finetune", path, "-o", tmp_path / "out.safetensors", *common)
