"""`factorpack eval` on tiny images and a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from factorpack.tune.images import ImageFolder
from tests.commands.running import MODEL, SIDE, failure, ok, reading
from tests.tune.small_net import SmallNet, build, write_images

ACCURACY = {"top1", "top5", "samples", "samples_per_s"}


def accuracy_by_hand(net: SmallNet, folder: Path) -> float:
    images = ImageFolder(folder, SIDE)
    net.eval()
    answers = [int(net(images[index][0][None]).argmax()) for index in range(len(images))]
    return sum(answer == images[index][1] for index, answer in enumerate(answers)) / len(images)


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
    assert re.search(r"top-1 \d+\.\d\d%, top-5 100\.00% of 6 images, \d+ images/s\n$", text)


REFERENCES = {
    "nonsense": "does not name a model, expected module:callable",
    ":build": "does not name a model, expected module:callable",
    "tests.tune.small_net:": "does not name a model, expected module:callable",
    "no_such_module:build": "there is no 'no_such_module:build'",
    "tests.tune.small_net:missing": "there is no 'tests.tune.small_net:missing'",
    "tests.tune.small_net:WORDS": "returns a str, expected a torch module",
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


def test_a_damaged_packed_file_is_called_damaged(tmp_path: Path) -> None:
    """And not taken for a checkpoint."""
    path, data = tmp_path / "x.safetensors", tmp_path / "data"
    write_images(data, 2)
    fp.save(fp.compress(build(), progress=False), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    common = ("--model", MODEL, "--data", data, "--image-size", SIDE, "--batch-size", 2, "--workers", 0)
    assert "checksum" in failure("eval", path, *common)
    assert "checksum" in failure("finetune", path, "-o", tmp_path / "out.safetensors", *common)
