"""Names with what wrappers put before them: in files, and as models need them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import factorpack as fp
from factorpack.checkpoints.weight_names import fit_names, plain_name, wrapper_of
from factorpack.errors import SourceError
from factorpack.report.differences import verify
from factorpack.source import open_source
from factorpack.tune.models import load_weights
from tests.helpers import assert_same_tensor

PARTS = st.sampled_from(["layer", "0", "weight", "conv", "model", "12"])
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=9, unique=True)
WRAPPERS = st.lists(st.sampled_from(["module.", "_orig_mod."]), max_size=3).map("".join)


@given(NAMES, WRAPPERS)
def test_what_a_wrapper_adds_is_taken_away(names: list[str], wrapper: str) -> None:
    wrapped = [wrapper + name for name in names]
    assert wrapper_of(wrapped) == wrapper
    assert [plain_name(name) for name in wrapped] == names


@given(NAMES, WRAPPERS, WRAPPERS)
def test_a_file_and_a_model_in_any_wrappers_fit(names: list[str], of_file: str, of_model: str) -> None:
    found, wanted = [of_file + name for name in names], [of_model + name for name in names]
    assert fit_names(found, wanted) == dict(zip(found, wanted, strict=True))


@given(NAMES, NAMES)
def test_every_name_of_the_model_has_one_of_the_file_or_none_has(found: list[str], wanted: list[str]) -> None:
    fitted = fit_names(found, wanted)
    assert set(fitted) <= set(found)
    assert not fitted or sorted(fitted.values()) == sorted(wanted)


@pytest.mark.parametrize(
    "found",
    [
        ["net.a.weight"],  # less than the model has
        ["net.a.weight", "net.a.bias", "net.b.weight"],  # another model
        ["student.a.weight", "student.a.bias", "teacher.a.weight", "teacher.a.bias"],  # either of two
        ["module.a.weight", "a.weight", "a.bias"],  # two for one place
    ],
)
def test_what_does_not_fit(found: list[str]) -> None:
    assert fit_names(found, ["a.weight", "a.bias"]) == {}


def test_the_model_before_its_average() -> None:
    found = [f"{prefix}.a.weight" for prefix in ("ema_model", "model")]
    assert fit_names(found, ["a.weight"]) == {"model.a.weight": "a.weight"}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_prefix_of_every_name_is_left_out_of_a_file(tmp_path: Path, suffix: str) -> None:
    model = nn.Linear(3, 2)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    path = tmp_path / f"net{suffix}"
    (torch.save if suffix == ".pt" else save_file)(state, path)
    opened = open_source(path)
    assert list(opened.entries) == sorted(model.state_dict(), reverse=suffix == ".pt")
    assert opened.notes[-1].text.endswith("every name began with 'module.', which is left out")
    assert_same_tensor(opened.entries["bias"].load(), model.bias.detach())


def test_a_prefix_of_some_names_is_a_name(tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "net.pt")
    opened = open_source(tmp_path / "net.pt")
    assert (list(opened.entries), opened.notes) == (["module.a", "b"], ())


def test_tied_names_stay_tied(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    torch.save({"module.a": weight, "module.b": weight}, tmp_path / "net.pt")
    opened = open_source(tmp_path / "net.pt")
    assert (list(opened.entries), dict(opened.aliases)) == (["a"], {"b": "a"})


def test_the_average_of_torch_itself(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save({"model_ema": AveragedModel(model).state_dict(), "epoch": 1}, tmp_path / "net.pth")
    opened = open_source(tmp_path / "net.pth")
    assert set(opened.entries) == set(model.state_dict())
    assert opened.notes[-1].text.endswith("'module.', which is left out, and so is 'n_averaged'")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model."])
@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_go_into_the_model_they_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str, wrapped: bool
) -> None:
    caplog.set_level(logging.INFO)
    weights = nn.Linear(3, 2)
    more = {"loss.scale": torch.ones(1)} if prefix == "model." else {}
    state = {f"{prefix}{name}": value for name, value in weights.state_dict().items()}
    torch.save({"state_dict": {**state, **more}}, tmp_path / "net.ckpt")
    inner = nn.Linear(3, 2)
    load_weights(nn.DataParallel(inner) if wrapped else inner, tmp_path / "net.ckpt")
    assert_same_tensor(inner.weight.detach(), weights.weight.detach())
    assert bool(caplog.records) == (prefix != "" or wrapped)
    assert ("left out: 1 tensors that the model does not have" in caplog.text) == bool(more)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    torch.save({"net.a": torch.ones(2)}, tmp_path / "net.pt")
    with pytest.raises(SourceError, match="does not fit the model"):
        load_weights(nn.Linear(3, 2), tmp_path / "net.pt")


def test_a_file_is_compared_with_what_it_was_made_from(tmp_path: Path) -> None:
    """Also where an earlier version has kept the prefix."""
    state = {f"module.{name}": value for name, value in nn.Linear(3, 2).state_dict().items()}
    torch.save(state, tmp_path / "net.pt")
    for source in (state, tmp_path / "net.pt"):
        checks = list(verify(fp.compress(source, fp.Scalar(8), progress=False), tmp_path / "net.pt"))
        assert [check.problem for check in checks] == ["", ""]
