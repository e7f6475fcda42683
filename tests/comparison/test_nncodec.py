"""The real NNCodec as a peer: through a stand-in for its package, and with the package where it is installed."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import zlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from factorpack.budget.goals import budget_bytes
from factorpack.commands.compare import markdown
from factorpack.comparison import Grid, Point, compare, nncodec
from factorpack.comparison.baselines import BASELINES, PLANNED, select_methods
from factorpack.comparison.nncodec import NNCodec
from factorpack.comparison.saved import read_comparison
from factorpack.errors import PlanError
from factorpack.source import open_source
from tests.helpers import seeded

needs_package = pytest.mark.skipif(importlib.util.find_spec("nncodec") is None, reason="needs nncodec")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.Linear(16, 12)
    )
    model[4].weight = model[3].weight  # tied
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.running_mean.copy_(seeded(16))
    norm.running_var.copy_(1 + seeded(16, seed=1).abs())
    return model.eval()


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model[:4](seeded(5, 8, seed=2))  # type: ignore[index, no-any-return]


class Fake:
    """As `nncodec.nnc`: NumPy dict -> bytearray -> NumPy dict, steps by qp, and lines on stdout."""

    def __init__(self) -> None:
        self.asked: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []

    def compress(self, parameters: Mapping[str, Any], **settings: Any) -> bytearray:
        print("INFO: compressing")
        self.asked.append((parameters, settings))
        assert settings["return_bitstream"]
        assert settings["bitstream_path"] is None
        octave = 2 ** settings["qp_density"]
        file = io.BytesIO()
        codes = {
            name: np.round(value / 2.0 ** (settings["qp" if value.ndim > 1 else "nonweight_qp"] / octave))
            for name, value in parameters.items()
        }
        np.savez(file, qps=[settings["qp"] / octave, settings["nonweight_qp"] / octave], **codes)
        return bytearray(zlib.compress(file.getvalue()))

    def decompress(self, stream: bytearray) -> Mapping[str, Any]:
        assert isinstance(stream, bytearray)  # the package takes anything else for a path
        stored = dict(np.load(io.BytesIO(zlib.decompress(stream))))
        weight, other = stored.pop("qps")
        return {
            name: np.float32(codes * 2.0 ** (weight if codes.ndim > 1 else other))
            for name, codes in stored.items()
        }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    package, module = ModuleType("nncodec"), ModuleType("nncodec.nnc")
    module.__dict__.update(compress=found.compress, decompress=found.decompress)
    monkeypatch.setitem(sys.modules, "nncodec", package)
    monkeypatch.setitem(sys.modules, "nncodec.nnc", module)
    monkeypatch.setattr(nncodec, "version", lambda _name: "9.8.7")
    return found


def test_it_decodes_to_the_models_own_state_dict(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    peer = NNCodec(model)
    decoded = peer.decode(peer.encode(-40))
    ((given, settings),) = fake.asked
    # Folded: the statistics are the same for every norm, and nobody has to store them. Tied: stored once.
    assert list(given) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "4.bias"]
    assert all(value.dtype == np.float32 for value in given.values())
    assert settings["use_dq"]
    assert settings["opt_qp"]
    assert (settings["qp"], settings["qp_density"]) == (-160, 4)  # in sixteenths of an octave
    assert {name: value.shape for name, value in decoded.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert torch.equal(decoded["4.weight"], decoded["3.weight"])
    wanted = outputs(model)
    model.load_state_dict(decoded)
    torch.testing.assert_close(outputs(model), wanted, rtol=0, atol=0.02)
    assert capsys.readouterr().out == ""


def test_untuned_it_gets_every_tensor_and_its_own_defaults(fake: Fake) -> None:
    model = net()
    peer = NNCodec(model, tuned=False)
    decoded = peer.decode(peer.encode(-26))
    ((given, settings),) = fake.asked
    assert given.keys() == model.state_dict().keys() - {"1.num_batches_tracked", "4.weight"}
    assert (settings["qp"], settings["nonweight_qp"], settings["opt_qp"]) == (-26, -75, False)
    torch.testing.assert_close(decoded["1.running_var"], model.state_dict()["1.running_var"])


def test_a_comparison_holds_its_own_files_and_version(fake: Fake, tmp_path: Path) -> None:
    def closeness(model: nn.Module) -> Mapping[str, float]:
        return {"top1": float((outputs(model).argmax(1) == outputs(net()).argmax(1)).float().mean())}

    points = compare(
        net(), [1.2, 1.5, 500.0], tmp_path, methods=["nncodec"], evaluate=closeness, progress=False
    )
    for point in points[:2]:
        assert (point.method, point.title, point.file) == (
            "nncodec",
            "NNCodec 9.8.7",
            f"nncodec-{point.asked_ratio:g}.nnc",
        )
        assert point.file_bytes == (tmp_path / str(point.file)).stat().st_size
        assert point.file_ratio >= point.asked_ratio
        assert "top1" in point.measured
    assert points[0].weight_error < points[1].weight_error
    assert points[2].file is None
    assert "is the smallest it makes" in points[2].settings
    before = len(fake.asked)
    assert compare(net(), [1.2, 1.5], tmp_path, methods=["nncodec"], progress=False) == points[:2]
    assert len(fake.asked) == before
    assert markdown(points).count("| NNCodec 9.8.7 |") == 3


@pytest.mark.usefixtures("fake")
def test_the_largest_file_within_the_size_is_taken(tmp_path: Path) -> None:
    (point,) = compare(net(), [1.3], tmp_path, methods=["nncodec"], progress=False)
    finer = float(point.settings.removeprefix("qp ")) - 0.25
    budget = budget_bytes(open_source(net()), 1.3)
    assert point.file_bytes <= budget < len(NNCodec(net()).encode(finer))


def test_it_runs_only_where_it_is_named() -> None:
    assert select_methods(["all"]) == [PLANNED, *BASELINES]
    assert select_methods(["nncodec", "all"]) == [PLANNED, *BASELINES, "nncodec"]


def test_without_the_package_it_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(nncodec, "version", absent)
    with pytest.raises(PlanError, match=r"not installed: pip install 'factorpack\[nncodec\]'"):
        compare(net(), [2.0], tmp_path / "new", methods=["nncodec"], progress=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("fake")
def test_it_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nncodec cannot be trained"):
        Grid(net(), [2.0], tmp_path, ["nncodec"], train=[seeded(4, 8)]).check()


@pytest.mark.usefixtures("fake")
def test_what_the_package_says_in_the_end_is_an_error_and_no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_settings: object) -> None:
        raise SystemExit("Can not read parameter_dict")

    monkeypatch.setattr(sys.modules["nncodec.nnc"], "compress", refuse)
    with pytest.raises(PlanError, match="cannot compress this model: Can not read"):
        NNCodec(net()).encode(-20)


def test_a_stored_version_must_be_text(tmp_path: Path) -> None:
    point = {**dict.fromkeys(("method", "settings"), "nncodec"), "asked_ratio": 2.0, "measured": {}}
    path = tmp_path / "compare.json"
    path.write_text(json.dumps({"original": {}, "points": [{**point, "version": "2.1.3"}]}))
    assert [each.title for each in read_comparison(path).points] == ["NNCodec 2.1.3"]
    path.write_text(json.dumps({"original": {}, "points": [{**point, "version": 2}]}))
    with pytest.raises(PlanError, match="holds no comparison"):
        read_comparison(path)
    assert Point("nncodec", 2.0, "").title == "NNCodec"


@needs_package
@pytest.mark.filterwarnings("default")
def test_the_package_itself_decodes_what_it_encodes() -> None:
    torch.manual_seed(0)
    model = net()
    for tuned in (True, False):
        peer = NNCodec(model, tuned)
        coarse, fine = peer.encode(-12), peer.encode(-60)
        assert 0 < len(coarse) < len(fine)
        other = net()
        other.load_state_dict(peer.decode(fine))
        torch.testing.assert_close(outputs(other), outputs(model), rtol=0, atol=0.01)
