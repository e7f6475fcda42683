"""The verbs on whole models: every way in gives the same, and every way out gives it back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import factorpack as fp
from benchmarks.zoo import mobilenet_v2, resnet18
from factorpack.decoding import decode
from factorpack.format.container import Reader
from factorpack.record import DTYPES
from tests.helpers import (
    assert_same_encoded,
    assert_same_tensor,
    compress_to,
    relative_error,
    seeded,
    shared_weights,
)

METHOD = fp.QSPCA(16, 4, sparsity=0.1, tile=32)


class Net(nn.Module):
    """A bit of everything: a stem, norms, a depthwise and a transposed convolution, a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3))
        self.up = nn.ConvTranspose2d(32, 32, 2, groups=2)
        self.head = nn.Linear(32, 10)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(seeded(*parameter.shape, seed=seed + index))

    def forward(self, images: Tensor) -> Tensor:
        x = self.up(self.body(self.depthwise(self.norm(self.stem(images)))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.packed.safetensors"


def assert_same_packed(found: fp.Packed, expected: fp.Packed) -> None:
    assert set(found) == set(expected)
    assert found.aliases == expected.aliases
    for name in expected:
        assert_same_encoded(found[name], expected[name])


class TestCompress:
    def test_state_dict_and_files_agree(self, tmp_path: Path) -> None:
        state = Net().state_dict()
        expected = fp.compress(state, METHOD)
        save_file(state, tmp_path / "a.safetensors")
        torch.save(state, tmp_path / "a.pt")
        (tmp_path / "folder").mkdir()
        save_file(state, tmp_path / "folder" / "only.safetensors")
        index = {"weight_map": dict.fromkeys(state, "only.safetensors")}
        (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
        for source in ("a.safetensors", "a.pt", "folder"):
            assert_same_packed(fp.compress(tmp_path / source, METHOD), expected)
        assert_same_packed(fp.compress(str(tmp_path / "a.pt"), METHOD), expected)

    def test_a_model_agrees_but_for_what_only_it_knows(self) -> None:
        model = Net()
        from_model, from_state = fp.compress(model, METHOD), fp.compress(model.state_dict(), METHOD)
        assert list(from_model) == list(from_state) == list(model.state_dict())
        assert from_model["up.weight"].transposed_groups == 2
        assert from_state["up.weight"].transposed_groups == 0
        for name in set(from_model) - {"up.weight"}:
            assert_same_encoded(from_model[name], from_state[name])

    def test_layers_and_exclude(self) -> None:
        layers = {"body.*": fp.Scalar(3), "up.weight": fp.Keep("float16")}
        packed = fp.compress(Net(), METHOD, layers=layers, exclude=["re:head.*"])
        assert packed["body.0.weight"].bits == {"codes": 3}
        assert packed["body.0.bias"].kind == "keep"
        assert packed["up.weight"].parts["values"].dtype == torch.float16
        assert packed["head.weight"].note == "excluded by 're:head.*'"
        assert_same_tensor(decode(packed["head.weight"]), Net().head.weight.detach())

    def test_the_model_is_neither_changed_nor_shared(self) -> None:
        model = Net()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        packed = fp.compress(model, METHOD)
        for name, tensor in model.state_dict().items():
            assert_same_tensor(tensor, before[name])
        expected = packed.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for name, tensor in packed.state_dict().items():
            assert_same_tensor(tensor, expected[name])

    def test_every_rule_leaves_its_note(self) -> None:
        packed = fp.compress(Net(), METHOD)
        assert packed["stem.weight"].note == "first convolution"
        assert packed["depthwise.weight"].note == "depthwise convolution"
        assert packed["head.weight"].note == "classifier"
        assert packed["norm.num_batches_tracked"].note == "int64 values"
        assert packed["body.2.weight"].note == ""

    def test_an_error_names_the_tensor(self) -> None:
        state = Net().state_dict()
        state["body.0.weight"][0, 0] = torch.nan
        with pytest.raises(fp.WeightError, match="9 of 4608 weights are NaN or infinite") as caught:
            fp.compress(state, METHOD)
        assert caught.value.__notes__ == ["while compressing tensor 'body.0.weight'"]

    def test_the_default_method(self) -> None:
        state = {"a.weight": seeded(256, 256)}
        assert_same_packed(fp.compress(state), fp.compress(state, fp.QSPCA(256, 5)))

    def test_nothing_to_compress(self, path: Path) -> None:
        fp.save(fp.compress({}), path)
        assert fp.load(path).state_dict() == {}


class TestSaveAndLoad:
    def test_everything_comes_back(self, path: Path) -> None:
        packed = fp.compress(Net(), METHOD)
        expected = packed.state_dict()
        fp.save(packed, path)
        loaded = fp.load(path)
        assert_same_packed(loaded, packed)
        assert list(loaded) == list(packed)
        assert (loaded.path, packed.path) == (path, path)
        for name, tensor in loaded.state_dict().items():
            assert_same_tensor(tensor, expected[name])

    def test_streaming_writes_the_same_bytes(self, tmp_path: Path) -> None:
        save_file(Net().state_dict(), tmp_path / "net.safetensors")
        for index, source in enumerate([Net(), Net().state_dict(), tmp_path / "net.safetensors", Tied()]):
            one, other = tmp_path / f"{index}a", tmp_path / f"{index}b"
            fp.save(fp.compress(source, METHOD), one)
            streamed = compress_to(other, source, METHOD, exclude=[])
            assert one.read_bytes() == other.read_bytes()
            assert streamed.path == other

    def test_streaming_takes_layers_and_exclude(self, path: Path) -> None:
        packed = compress_to(path, Net(), METHOD, layers={"up.weight": fp.Scalar(2)}, exclude=["head.*"])
        assert packed["up.weight"].bits == {"codes": 2}
        assert packed["head.weight"].kind == "keep"

    def test_what_is_in_memory_is_not_read_again_once_it_is_saved(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        packed = fp.compress({"w": seeded(32, 64)}, fp.Scalar(4), progress=False)
        fp.save(packed, path)

        def read(_: Reader, name: str) -> None:
            raise AssertionError(f"{name} was read")

        monkeypatch.setattr(Reader, "__getitem__", read)
        assert packed.state_dict()["w"].shape == (32, 64)
        with pytest.raises(AssertionError, match="w was read"):
            fp.load(path).state_dict()

    def test_a_loaded_file_can_be_saved_over_itself(self, path: Path) -> None:
        fp.save(fp.compress(Net(), METHOD), path)
        before = path.read_bytes()
        fp.save(fp.load(path), path)
        assert path.read_bytes() == before

    def test_a_failure_leaves_no_file(self, path: Path) -> None:
        state = Net().state_dict()
        state["head.weight"][0, 0] = torch.nan
        with pytest.raises(fp.WeightError):
            compress_to(path, state, METHOD)
        assert list(path.parent.iterdir()) == []

    def test_shapes_without_decoding(self, path: Path) -> None:
        packed = fp.compress(Tied(), METHOD)
        expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in packed.state_dict().items()}
        assert packed.shapes() == expected
        fp.save(packed, path)
        assert fp.load(path).shapes() == expected

    def test_it_says_what_it_is(self, path: Path) -> None:
        packed = fp.compress(Tied(), METHOD)
        assert repr(packed) == "Packed(1 tensors)"
        assert packed.path is None
        fp.save(packed, path)
        assert repr(packed) == f"Packed(1 tensors in {path})"


class TestBackIntoAModel:
    def test_load_into_equals_load_state_dict(self, path: Path) -> None:
        packed = compress_to(path, Net(), METHOD)
        one, other = Net(seed=50), Net(seed=100)
        assert packed.load_into(one) is one
        other.load_state_dict(packed.state_dict())
        for name, tensor in one.state_dict().items():
            assert_same_tensor(tensor, other.state_dict()[name])
        assert all(parameter.requires_grad for parameter in one.parameters())
        assert_same_tensor(one.eval()(torch.ones(1, 3, 12, 12)), other.eval()(torch.ones(1, 3, 12, 12)))

    def test_into_a_model_of_another_type(self) -> None:
        packed = fp.compress(Net(), METHOD)
        model = packed.load_into(Net().half())
        assert_same_tensor(model.state_dict()["stem.weight"], packed.state_dict()["stem.weight"].half())

    def test_what_is_loaded_can_be_trained_without_changing_the_file(self) -> None:
        packed = fp.compress(Net(), METHOD)
        before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
        for tensor in packed.state_dict().values():
            tensor.zero_()
        for name, tensor in packed.state_dict().items():
            assert_same_tensor(tensor, before[name])

    def test_names_that_do_not_fit(self) -> None:
        packed = fp.compress(Net(), METHOD)
        message = r"the model lacks \['body.0.bias', .*the file lacks \['bias', 'weight'\]"
        with pytest.raises(fp.SourceError, match=message):
            packed.load_into(nn.Linear(3, 3))

    def test_a_shape_that_does_not_fit_changes_nothing(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        packed = fp.compress(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6)), fp.Scalar(4))
        message = r"tensor '1.weight' is \(6, 4\) in the file, \(5, 4\) in the model"
        with pytest.raises(fp.SourceError, match=message):
            packed.load_into(model)
        for name, tensor in model.state_dict().items():
            assert_same_tensor(tensor, before[name])

    def test_a_model_without_memory(self) -> None:
        packed = fp.compress(nn.Linear(4, 4), fp.Scalar(4))
        model = packed.load_into(nn.Linear(4, 4, device="meta"))
        for name, tensor in model.state_dict().items():
            assert_same_tensor(tensor, packed.state_dict()[name])

    def test_tied_weights_come_back_tied(self, path: Path) -> None:
        model = Tied()
        packed = compress_to(path, model, METHOD)
        assert list(packed) == ["embed.weight"]
        assert packed.aliases == {"head.weight": "embed.weight"}
        state = packed.state_dict()
        assert state["head.weight"] is state["embed.weight"]
        assert_same_encoded(packed["head.weight"], packed["embed.weight"])
        other = Tied()
        packed.load_into(other)
        assert other.head.weight is other.embed.weight
        assert_same_tensor(other.head.weight.detach(), state["embed.weight"])
        assert set(fp.load(path).state_dict()) == {"embed.weight", "head.weight"}


class TestExport:
    def test_what_others_read_is_what_we_decode(self, tmp_path: Path) -> None:
        packed = fp.compress(Net(), METHOD)
        packed.decode_to(tmp_path / "plain.safetensors")
        read = load_file(tmp_path / "plain.safetensors")
        assert set(read) == set(packed)
        for name, tensor in packed.state_dict().items():
            assert_same_tensor(read[name], tensor)
        Net().load_state_dict(read)

    def test_every_type_and_odd_sizes(self, tmp_path: Path) -> None:
        """Bytes before floats: nothing may depend on the alignment of what comes first."""
        names = ("bool", "float64", "uint8", "bfloat16", "float8_e5m2", "complex64", "int64")
        state = {name: (seeded(3) * 9).to(DTYPES[name]) for name in names} | {"empty": torch.empty(0, 2)}
        fp.compress(state, METHOD).decode_to(tmp_path / "plain.safetensors")
        read = load_file(tmp_path / "plain.safetensors")
        assert set(read) == set(state)
        for name, tensor in state.items():
            assert_same_tensor(read[name], tensor)

    def test_tied_tensors_stand_under_both_names(self, tmp_path: Path) -> None:
        fp.compress(Tied(), METHOD).decode_to(tmp_path / "plain.safetensors")
        read = load_file(tmp_path / "plain.safetensors")
        assert_same_tensor(read["head.weight"], read["embed.weight"])

    def test_a_type_safetensors_lacks(self, tmp_path: Path) -> None:
        packed = fp.compress({"x": torch.zeros(3, dtype=torch.complex128)}, METHOD)
        with pytest.raises(fp.SourceError, match="safetensors has no type for 'x'"):
            packed.decode_to(tmp_path / "plain.safetensors")
        assert list(tmp_path.iterdir()) == []

    def test_an_exported_file_can_be_compressed_again(self, tmp_path: Path) -> None:
        fp.compress(Net(), fp.Scalar(4, "minmax")).decode_to(tmp_path / "plain.safetensors")
        again = fp.compress(tmp_path / "plain.safetensors", fp.Keep())
        assert_same_tensor(
            decode(again["up.weight"]), decode(fp.compress(Net(), fp.Scalar(4, "minmax"))["up.weight"])
        )


@pytest.mark.parametrize(
    ("name", "build", "method"),
    [
        ("resnet18", resnet18, fp.QSPCA(128, 4, sparsity=0.2, clip="minmax")),
        ("mobilenet_v2", mobilenet_v2, fp.QSPCA(128, 4)),
    ],
    ids=["resnet18", "mobilenet_v2"],
)
class TestTrainedModels:
    def test_there_and_back_in_a_file_of_the_size_it_tells(
        self, name: str, build: Callable[[], nn.Module], method: fp.QSPCA, path: Path
    ) -> None:
        source = shared_weights(name)
        packed = compress_to(path, source, method)
        state = load_file(source)
        decoded = packed.state_dict()
        assert set(decoded) == set(state)
        for key, tensor in state.items():
            assert (decoded[key].shape, decoded[key].dtype) == (tensor.shape, tensor.dtype)
            assert decoded[key].isfinite().all()
            if packed[key].kind == "keep":
                assert_same_tensor(decoded[key], tensor)
            else:  # less than the energy of the weight itself, which storing zeros would lose
                assert 0 < relative_error(decoded[key], tensor) < 1
        model = packed.load_into(build())
        assert model.eval()(torch.zeros(1, 3, 64, 64)).isfinite().all()
        report = packed.size()
        assert report.file_bytes == path.stat().st_size
        assert sum(sum((line.stored_bytes or {}).values()) for line in report.tensors) == report.file_bytes
        assert report.original_bytes == sum(tensor.nbytes for tensor in state.values())
        assert report.file_ratio == report.original_bytes / path.stat().st_size
        assert {line.name for line in report.tensors} == set(build().state_dict())


def test_asking_for_a_name_reads_no_tensor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp.save(fp.compress(Tied(), METHOD), path)
    packed = fp.load(path)
    monkeypatch.setattr("factorpack.format.container.read_row", None)  # reading one would call it
    assert set(packed) | set(packed.aliases) == {name for name in Tied().state_dict() if name in packed}
    assert "nothing" not in packed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp.compress(123, ratio=8), "the source is a int, expected a model, a state dict or a path"),  # type: ignore[arg-type]
        (lambda: fp.compress(nn.Linear, ratio=8), "the source is the class Linear, expected a model"),  # type: ignore[arg-type]
        (lambda: fp.compress(nn.ReLU(), ratio=8), "the source has no tensors"),
        (lambda: fp.compress(nn.Linear(4, 4), "scalar"), "the method is 'scalar', expected an object"),  # type: ignore[arg-type]
        (lambda: fp.compress(nn.Linear(4, 4), fp.Scalar), "expected an object that has its settings"),  # type: ignore[arg-type]
        (lambda: fp.save(nn.Linear(4, 4), "x"), "a Linear cannot be saved, expected what fp.compress"),  # type: ignore[arg-type]
        (
            lambda: fp.compress(nn.Linear(4, 4), ratio=2, calibration="imagenet"),
            "calibration is 'imagenet', expected batches of inputs or 'synthetic'",
        ),
    ],
)
def test_what_is_of_another_type_is_an_error_of_ours(call: Callable[[], object], message: str) -> None:
    with pytest.raises(fp.FactorpackError, match=message):
        call()
