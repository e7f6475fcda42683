"""Whole models: the exported file answers as torch does with the decoded weights, and is as small."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.methods import Method
from factorpack.onnx import exporter as exporting
from factorpack.onnx import proto as writing
from factorpack.record import Encoded
from tests.commands.running import failure, ok
from tests.helpers import seeded
from tests.onnx.graphs import FOLDED, PLAIN, run

IMAGES = seeded(2, 3, 12, 12)
METHODS: dict[str, Method] = {
    "factors": fp.QSPCA(8, 3, tile=16),
    "spatial": fp.methods.SpatialSVD(rank=2, bits=4),
    "scalar": fp.Scalar(4),
    "levels": fp.methods.TTQ(channels=True),
    "codewords": fp.methods.AQ(2, 8, tile=4, iterations=2),
    "keep": fp.Keep("float16"),
}
MODEL = "tests.onnx.test_exporter:small_net"


@pytest.fixture(scope="module", autouse=True)
def torch_reads_its_functions_once() -> Iterator[None]:
    """At every export it parses the source of 500 functions, which is half of the time."""
    registration = pytest.importorskip(
        "torch.onnx._internal.exporter._registration", reason="needs onnxscript"
    )
    registry = registration.ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib)))
        yield


class Net(nn.Module):
    """A plain, a depthwise and a grouped transposed convolution, a norm between them, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2, groups=2)
        self.fc = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        inner = torch.relu(self.depthwise(self.norm(self.stem(images))))
        logits: Tensor = self.fc(self.up(inner).mean((2, 3)))
        return logits


class Tied(nn.Module):
    """An embedding that is the classifier too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(16, 16)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens) * scale)
        return logits


def small_net() -> nn.Module:
    torch.manual_seed(0)
    net = Net().eval()
    nn.init.uniform_(net.norm.running_var, 0.5, 2.0)
    return net


def packed_with(method: Method, net: nn.Module | None = None) -> fp.Packed:
    return fp.compress(net or small_net(), method, layers={"*.weight": method}, progress=False)


def assert_answers(path: Path, packed: fp.Packed, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Optimised and not: what torch answers with the decoded weights, to 1e-4 of the largest answer."""
    import onnx

    onnx.checker.check_model(str(path), full_check=True)
    with torch.no_grad():
        expected = packed.load_into(copy.deepcopy(model))(**inputs)
    for optimised in (FOLDED, PLAIN):
        found = run(path.read_bytes(), inputs, optimised)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture
def needs_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("needs_onnx")
@pytest.mark.parametrize("kind", METHODS)
def test_every_kind_answers_as_torch_does(kind: str, tmp_path: Path) -> None:
    net, path = small_net(), tmp_path / "net.onnx"
    before = copy.deepcopy(net.state_dict())
    packed = packed_with(METHODS[kind])
    made = fp.onnx.export(packed, net, IMAGES, path)
    assert made.bytes == path.stat().st_size
    assert made.absent == ()
    assert kind in {packed[name].kind for name in made.rebuilt}
    assert_answers(path, packed, net, {"images": IMAGES})
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.usefixtures("needs_onnx")
def test_a_budget_with_folded_norms_and_an_open_batch(tmp_path: Path) -> None:
    net, path = small_net(), tmp_path / "net.onnx"
    packed = fp.compress(net, ratio=2, progress=False)
    assert "constant" in {encoded.kind for encoded in packed.values()}
    fp.onnx.export(packed, net, IMAGES, path, dynamic_batch=True, opset=18)
    assert_answers(path, packed, net, {"images": seeded(5, 3, 12, 12)})


@pytest.mark.usefixtures("needs_onnx")
def test_tied_weights_are_stored_once_and_what_the_graph_lacks_is_said(tmp_path: Path) -> None:
    net, path = Tied().eval(), tmp_path / "net.onnx"
    packed = packed_with(fp.Scalar(4), net)
    inputs = {"tokens": torch.tensor([[1, 2, 39]]), "scale": torch.tensor(2.0)}
    made = fp.onnx.export(packed, net, inputs, path)
    assert made.absent == ("unused.weight",)
    assert len(made.rebuilt) == 1
    assert_answers(path, packed, net, inputs)


@pytest.mark.usefixtures("needs_onnx")
def test_weights_fold_when_a_session_opens_and_not_before(tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    path, opened = tmp_path / "net.onnx", tmp_path / "opened.onnx"
    fp.onnx.export(packed_with(METHODS["factors"]), small_net(), IMAGES, path)
    written = {node.op_type for node in onnx.load(path).graph.node}
    assert {"MatMul", "BitShift", "BatchNormalization"} <= written
    assert not {"CastLike", "Shape"} & written  # how the exporter spells the bias a layer lacks
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(opened), 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    left = {node.op_type for node in onnx.load(opened).graph.node}
    assert not {"MatMul", "BitShift", "BatchNormalization"} & left


@pytest.mark.usefixtures("needs_onnx")
def test_a_file_is_about_as_large_as_its_codes(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 256, 3)).eval()
    packed = packed_with(fp.Scalar(3), net)
    made = fp.onnx.export(packed, net, IMAGES, tmp_path / "net.onnx")
    fixed = sum(sum(line.fixed_bits.values()) for line in packed.size().tensors) / 8
    assert fixed <= made.bytes <= 1.05 * fixed


@pytest.mark.usefixtures("needs_onnx")
def test_nothing_of_the_machine_is_in_the_file(tmp_path: Path) -> None:
    fp.onnx.export(packed_with(fp.Scalar(4)), small_net(), IMAGES, tmp_path / "net.onnx")
    assert b"forward" not in (tmp_path / "net.onnx").read_bytes()


@pytest.mark.usefixtures("needs_onnx")
def test_a_wrong_weight_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = writing.rebuild
    monkeypatch.setattr(writing, "rebuild", lambda *given: true(given[0], _wrong(given[1]), *given[2:]))
    packed = packed_with(fp.Scalar(4))
    fp.onnx.export(packed, small_net(), IMAGES, tmp_path / "net.onnx")
    with pytest.raises(AssertionError):
        assert_answers(tmp_path / "net.onnx", packed, small_net(), {"images": IMAGES})


def _wrong(encoded: Encoded) -> Encoded:
    if "scale" not in encoded.parts:
        return encoded
    return replace(encoded, parts={**encoded.parts, "scale": encoded.parts["scale"] * 1.01})


@pytest.mark.usefixtures("needs_onnx")
def test_what_cannot_be_exported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, path = packed_with(fp.Scalar(4)), tmp_path / "net.onnx"
    with pytest.raises(fp.PlanError, match="opset is 17, allowed are 18 and above"):
        fp.onnx.export(packed, small_net(), IMAGES, path, opset=17)
    with pytest.raises(fp.SourceError, match="torch cannot export the model"):
        fp.onnx.export(packed, small_net(), torch.zeros(1, 4, 12, 12), path)
    with pytest.raises(fp.SourceError, match="the model lacks"):
        fp.onnx.export(packed, nn.Linear(3, 3), IMAGES, path)
    monkeypatch.setattr(exporting, "MAX_BYTES", 1000)
    with pytest.raises(fp.PlanError, match="allowed are 1000"):
        fp.onnx.export(packed, small_net(), IMAGES, path)
    assert not path.exists()


@pytest.mark.usefixtures("needs_onnx")
@pytest.mark.parametrize(("kind", "part"), [("codewords", "indices"), ("levels", "codes")])
def test_codes_that_stand_for_nothing_are_not_written(kind: str, part: str, tmp_path: Path) -> None:
    packed, name = packed_with(METHODS[kind]), "depthwise.weight"
    codes = torch.full_like(packed[name].parts[part], 7)
    wrong = replace(packed[name], parts={**packed[name].parts, part: codes})
    packed.replace({**packed, name: wrong})
    with pytest.raises(fp.FormatError):
        fp.onnx.export(packed, small_net(), IMAGES, tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.usefixtures("needs_onnx")
def test_from_the_command_line(tmp_path: Path) -> None:
    net, file, path = small_net(), tmp_path / "net.safetensors", tmp_path / "net.onnx"
    packed = packed_with(fp.QSPCA(8, 3, tile=16))
    fp.save(packed, file)
    given = ["export", file, "--model", MODEL, "--onnx", path, "--image-size", 12]
    made = json.loads(ok(*given, "--dynamic-batch", "--json"))
    assert (made["bytes"], made["absent"]) == (path.stat().st_size, [])
    assert_answers(path, packed, net, {"images": IMAGES})
    assert "tensors rebuilt by the graph" in ok(*given)


def test_without_onnx_the_way_to_get_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_NEEDED", ("onnx_that_is_not_there",))
    with pytest.raises(fp.PlanError, match=r"not installed: pip install 'factorpack\[onnx\]'"):
        fp.onnx.export(packed_with(fp.Scalar(4)), small_net(), IMAGES, tmp_path / "net.onnx")
    fp.save(packed_with(fp.Scalar(4)), tmp_path / "net.safetensors")
    given = ["export", tmp_path / "net.safetensors", "--model", MODEL, "--onnx", tmp_path / "net.onnx"]
    assert "pip install 'factorpack[onnx]'" in failure(*given)
