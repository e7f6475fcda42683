"""Weights as training programs save them: under a name, beside averages, optimizers and settings."""

from __future__ import annotations

import argparse
import logging
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.engine.task import Outcome, Task, perform
from factorpack.errors import SourceError
from factorpack.source import Source, open_source
from tests.helpers import assert_same_tensor, compress_to, seeded

STATE = {"conv.weight": seeded(8, 3, 3, 3), "norm.running_mean": seeded(8), "fc.weight": seeded(5, 8)}
AVERAGE = {name: value + 1 for name, value in STATE.items()}


def optimizer() -> dict[str, Any]:
    """What Adam saves of a layer with 16 weights and 4 biases."""
    shapes: list[tuple[int, ...]] = [(4, 4), (4,)]
    state = {
        number: {"step": torch.tensor(1.0), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}
        for number, shape in enumerate(shapes)
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]}


def saved(folder: Path, content: object, name: str = "net.ckpt", zipped: bool = True) -> Path:
    torch.save(content, folder / name, _use_new_zipfile_serialization=zipped)
    return folder / name


def assert_read(opened: Source, expected: dict[str, Tensor]) -> None:
    assert list(opened.entries) == list(expected)
    for name, value in expected.items():
        assert_same_tensor(opened.entries[name].load(), value)


def said(opened: Source) -> str:
    return "\n".join(note.text for note in opened.notes)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_lightning_saves(tmp_path: Path, zipped: bool) -> None:
    content = {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": OrderedDict(STATE),
        "loops": {"fit_loop": {"state_dict": {}, "seen": torch.ones(3)}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5), "best": "a.ckpt"}},
        "optimizer_states": [optimizer()],
        "lr_schedulers": [{"last_epoch": 3}],
        "hyper_parameters": argparse.Namespace(rate=0.1, folder="x"),
    }
    opened = open_source(saved(tmp_path, content, zipped=zipped))
    assert_read(opened, STATE)
    adam = 2 * (16 + 4 + 1) * 4  # two moments and two counts of steps
    assert f"'optimizer_states' ({adam:,} bytes)" in said(opened)
    assert "only the weights under 'state_dict' are used" in said(opened)
    assert {note.level for note in opened.notes} == {logging.INFO}


@pytest.mark.parametrize("name", ["best.pth.tar", "best.tar"])
@pytest.mark.parametrize("zipped", [True, False])
def test_what_timm_saves(tmp_path: Path, name: str, zipped: bool) -> None:
    content = {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": STATE,
        "optimizer": optimizer(),
        "args": argparse.Namespace(model="resnet18", lr=0.1),
        "state_dict_ema": AVERAGE,
        "metric": 71.2,
    }
    path = saved(tmp_path, content, name, zipped)
    opened = open_source(path)
    assert_read(opened, AVERAGE)
    first = opened.notes[0]
    assert first.level == logging.WARNING
    assert "'state_dict_ema', an average over training; others are under 'state_dict' (choose" in first.text
    assert_read(open_source(path, "state_dict"), STATE)


def test_a_key_is_one_of_the_names(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": STATE, "model_ema": AVERAGE})
    with pytest.raises(SourceError, match=r"no weights under 'ema', only under 'model', 'model_ema'"):
        open_source(path, "ema")
    with pytest.raises(SourceError, match=r"the key 'model' is for a torch file"):
        open_source(tmp_path / "net.safetensors", "model")
    with pytest.raises(SourceError, match=r"the key 'model' is for a torch file"):
        open_source(tmp_path, "model")
    with pytest.raises(SourceError, match=r"the key 'model' is for a torch file, and the source is a dict"):
        open_source(STATE, "model")


def test_an_optimizer_of_named_parameters(tmp_path: Path) -> None:
    state = {name: {"step": torch.ones(()), "exp_avg": value} for name, value in STATE.items()}
    path = saved(tmp_path, {"generator": STATE, "adam": {"state": state, "param_groups": []}})
    assert_read(open_source(path), STATE)


def test_an_average_of_parameters_alone_is_no_model(tmp_path: Path) -> None:
    parameters = {name: value for name, value in AVERAGE.items() if "running" not in name}
    opened = open_source(saved(tmp_path, {"model": STATE, "ema": parameters}))
    assert_read(opened, STATE)
    assert "the weights under 'model'; others are under 'ema'" in said(opened)


def test_deeper_and_under_unusual_names(tmp_path: Path) -> None:
    opened = open_source(saved(tmp_path, {"run": {"generator": STATE}, "step": 5}))
    assert (opened.key, "left out: 'step'" in said(opened)) == ("run.generator", True)
    assert_read(opened, STATE)
    assert_read(open_source(saved(tmp_path, {"ema": {"decay": 0.9, "shadow": STATE}})), STATE)


def test_two_networks_that_nobody_can_choose_from(tmp_path: Path) -> None:
    path = saved(tmp_path, {"generator": STATE, "discriminator": AVERAGE})
    with pytest.raises(
        SourceError, match=r"has weights under 'generator', 'discriminator': choose with --key"
    ):
        open_source(path)
    assert_read(open_source(path, "discriminator"), AVERAGE)
    mixed = saved(tmp_path, {**STATE, "teacher": AVERAGE})
    with pytest.raises(SourceError, match=r"has weights under '\.', 'teacher'"):
        open_source(mixed)
    assert_read(open_source(mixed, "."), STATE)


def test_numbers_beside_the_weights(tmp_path: Path) -> None:
    opened = open_source(saved(tmp_path, {**STATE, "epoch": 3, "note": "best"}))
    assert_read(opened, STATE)
    assert "the top of the file are used; left out: 'epoch', 'note'" in said(opened)
    assert not open_source(saved(tmp_path, STATE)).notes


def test_what_is_nested_without_end(tmp_path: Path) -> None:
    endless: dict[str, Any] = {"t": [torch.ones(4)]}
    endless["self"] = endless
    content = {"state_dict": STATE, "endless": endless, "twice": [endless, endless], "deep": []}
    path, deep = saved(tmp_path, content), tmp_path / "deep.ckpt"
    levels = 20_000
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(deep, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):  # the list that is the last value gets a list, which gets one
                assert data.endswith(b"u.")
                data = data[:-2] + b"]" * levels + b"a" * levels + b"u."
            new.writestr(name, data)
    for each in (path, deep):
        opened = open_source(each)
        assert_read(opened, STATE)
        assert "'endless' (16 bytes), 'twice' (16 bytes), 'deep'" in said(opened)


class Here:
    """An engine whose worker is this process: what it is told has to suffice."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        yield from map(perform, tasks)


@pytest.mark.parametrize("how", [{"method": fp.Scalar(8)}, {"max_bytes": 2000}], ids=["method", "budget"])
def test_workers_read_the_same_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: dict[str, Any]
) -> None:
    path = saved(tmp_path, {"model": STATE, "model_ema": AVERAGE})
    made = compress_to(tmp_path / "out", path, key="model", engine=Here(), progress=False, **how)
    torch.testing.assert_close(made.state_dict()["fc.weight"], STATE["fc.weight"], atol=0.1, rtol=0.1)
    assert not caplog.records
    compress_to(tmp_path / "out", path, fp.Scalar(8), progress=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_advice_on_a_whole_model_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool, wrapped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    net = Net()
    path = saved(tmp_path, {"epoch": 3, "model": net} if wrapped else net, "net.pt", zipped)
    with pytest.raises(SourceError, match="a whole pickled model, with its code") as caught:
        open_source(path)
    assert "factorpack never runs code" in str(caught.value)
    first, *lines = caught.value.__notes__
    assert first.startswith("If you trust it")
    exec("\n".join(lines), {"torch": torch})
    assert_read(open_source("net-weights.pt"), dict(net.state_dict()))


class Settings:
    """A class of the one who trained."""

    def __init__(self) -> None:
        self.rate = 0.1


def test_the_advice_on_settings_of_an_unknown_class_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, {"state_dict": STATE, "settings": Settings()}, "net.pt")
    with pytest.raises(SourceError, match=r"it holds a \S+Settings, and not only tensors") as caught:
        open_source(path)
    exec("\n".join(caught.value.__notes__[1:]), {"torch": torch})
    assert_read(open_source("net-weights.pt"), STATE)


def test_an_archive_of_files(tmp_path: Path) -> None:
    import tarfile

    torch.save(STATE, tmp_path / "net.pt")
    with tarfile.open(tmp_path / "net.tar", "w") as archive:
        archive.add(tmp_path / "net.pt", "net.pt")
    with pytest.raises(SourceError, match=r"net\.tar is an archive of files, .* unpack it first"):
        open_source(tmp_path / "net.tar")
