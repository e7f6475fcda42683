"""Layers that hold their weight as its bytes in the file: the weights of dense ones bit for bit, in less memory."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.decoding import decode
from factorpack.format.container import Writer, stored
from factorpack.runtime.apply import resident_bytes
from factorpack.runtime.coded_weight import CodedWeight
from factorpack.runtime.packed_layers import PackedLayer
from factorpack.weight import Weight
from tests.forking import run_forked
from tests.helpers import assert_close, assert_same_encoded, assert_same_tensor, seeded
from tests.runtime.layer_cases import LAYERS, METHODS, compress


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_coded_layer_answers_as_a_decoded_one(layer: str, method: str) -> None:
    module, inputs = LAYERS[layer]
    model = nn.Sequential(copy.deepcopy(module))
    packed = compress(model, METHODS[method])
    dense = packed.load_into(copy.deepcopy(model))
    applied = packed.apply(model, "coded")
    assert_same_tensor(model(inputs), dense(inputs))
    if packed["0.weight"].kind != "keep":
        assert applied.layers[0].mode == "coded"
        assert isinstance(model[0], PackedLayer)
        assert_same_tensor(model[0].weight, dense[0].weight)  # type: ignore[index,arg-type]


class Net(nn.Module):
    """Several layers, one of them used twice, and a head that is tied to the table."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.table(tokens)
        for layer in (*self.layers, self.layers[0]):
            values = layer(values).relu()
        answers: Tensor = self.head(values)
        return answers


TOKENS = torch.tensor([[1, 5, 39], [0, 2, 7]])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    fp.save(compress(Net(), fp.Scalar(4)), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_a_model_on_no_device_gets_only_what_it_holds(file: Path, threads: int) -> None:
    expected = fp.load(file).load_into(Net())(TOKENS)
    with torch.device("meta"):
        model = Net()
    packed = fp.load(file)
    applied = packed.apply(model, "coded")
    for _ in range(3):  # ahead from the second on
        assert_same_tensor(model(TOKENS), expected)
    assert model.table.packed is model.head.packed
    names = ["table.weight", "head.weight", *(f"layers.{number}.weight" for number in range(3))]
    assert [(layer.name, layer.mode) for layer in applied.layers] == [(name, "coded") for name in names]
    assert packed._reader is not None
    held = sum(packed._reader.rows[name].stored_bytes for name in names if name != "head.weight")
    assert applied.resident_bytes == held + 4 * 32 * 3  # the biases
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    assert threads == torch.get_num_threads()


def test_a_dense_model_on_no_device_gets_everything(file: Path) -> None:
    with torch.device("meta"):
        model = Net()
    model.layers[1].requires_grad_(False)
    assert_same_tensor(fp.load(file).load_into(model)(TOKENS), fp.load(file).load_into(Net())(TOKENS))
    assert model.head.weight is model.table.weight
    assert [layer.weight.requires_grad for layer in model.layers] == [True, False, True]  # type: ignore[union-attr]


def test_a_buffer_that_no_file_has_is_not_invented(file: Path) -> None:
    with torch.device("meta"):
        model = Net()
        model.register_buffer("angles", torch.ones(3), persistent=False)
    with pytest.raises(fp.SourceError, match="buffer 'angles' is on the meta device and in no file"):
        fp.load(file).apply(model, "coded")


def test_what_is_in_memory_is_encoded_for_it() -> None:
    packed = compress(nn.Sequential(nn.Linear(24, 10)), fp.Scalar(4))
    encoded = packed["0.weight"]
    held = packed.apply(nn.Sequential(nn.Linear(24, 10)), "coded").model[0].packed  # type: ignore[index,union-attr]
    assert isinstance(held, CodedWeight)
    assert_same_encoded(held.encoded(), encoded)
    assert f"{held.row.stored_bytes} bytes" in repr(held)


def test_a_stream_that_cannot_be_read_is_named_where_its_layer_runs() -> None:
    packed = compress(nn.Sequential(nn.Linear(64, 64)), fp.Scalar(4))
    model = packed.apply(nn.Sequential(nn.Linear(64, 64)), "coded").model
    model[0].packed.stream.fill_(255)  # type: ignore[index,union-attr,operator]
    with pytest.raises(fp.FormatError, match=r"tensor '0\.weight': part"):
        model(seeded(1, 64))


def test_copies_pickles_and_state_dicts(file: Path) -> None:
    model = Net()
    fp.load(file).apply(model, "coded")
    expected = model(TOKENS)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert_same_tensor(twin(TOKENS), expected)
        assert twin.head.packed.number != model.head.packed.number  # type: ignore[union-attr]
        assert twin.head.packed.stream.data_ptr() != model.head.packed.stream.data_ptr()  # type: ignore[union-attr]
    twin.load_state_dict(model.state_dict())
    assert "head.packed.stream" in model.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_type(file: Path, dtype: torch.dtype) -> None:
    model = Net()
    packed = fp.load(file)
    packed.apply(model, "coded")
    model.to(dtype)
    assert_same_tensor(model.head.weight, decode(packed["table.weight"]).to(dtype))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_it_compiles_in_one_graph(file: Path) -> None:
    graphs: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph.code)
        return graph.forward

    model = Net()
    fp.load(file).apply(model, "coded")
    with torch.inference_mode():
        assert_same_tensor(torch.compile(model, backend=seen, fullgraph=True)(TOKENS), model(TOKENS))
    assert len(graphs) == 1
    assert graphs[0].count("decode_stream") >= 5


@pytest.mark.filterwarnings("ignore")
def test_torch_compiles_packed_and_coded_layers() -> None:
    """By all of the compiler but its code generator, which takes half a minute."""
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    packed = compress(model, fp.Scalar(4))
    sizes = [packed.apply(copy.deepcopy(model), mode).resident_bytes for mode in ("coded", "packed")]  # type: ignore[arg-type]
    applied = packed.apply(model, "packed", max_memory=sum(sizes) // 2)
    assert {layer.mode for layer in applied.layers} == {"coded", "packed"}
    inputs = seeded(3, 128)
    with torch.inference_mode():
        assert_close(torch.compile(model, backend="aot_eager")(inputs), model(inputs))


def test_the_operator_and_its_shape_agree() -> None:
    packed = compress(nn.Sequential(nn.Linear(24, 10)), fp.Scalar(4))
    held = packed.apply(nn.Sequential(nn.Linear(24, 10)), "coded").model[0].packed  # type: ignore[index,union-attr]
    arguments = (held.stream, held.number, torch.float32, [10, 24])
    torch.library.opcheck(torch.ops.factorpack.decode_stream.default, arguments)  # type: ignore[no-untyped-call]


class TestALimitOfMemory:
    def test_packed_where_it_fits_and_coded_elsewhere(self, file: Path) -> None:
        sizes = {}
        for mode in ("coded", "packed"):
            model = Net()
            sizes[mode] = fp.load(file).apply(model, mode).resident_bytes  # type: ignore[arg-type]
        middle = (sizes["coded"] + sizes["packed"]) // 2
        assert sizes["coded"] < middle < sizes["packed"]
        model = Net()
        applied = fp.load(file).apply(model, "packed", max_memory=middle)
        assert applied.resident_bytes <= middle
        assert {layer.mode for layer in applied.layers} == {"packed", "coded"}
        assert_same_tensor(model(TOKENS), fp.load(file).load_into(Net())(TOKENS))
        assert {
            layer.mode for layer in fp.load(file).apply(Net(), "packed", max_memory=sizes["packed"]).layers
        } == {"packed"}

    def test_what_cannot_fit_is_refused_with_what_can_before_anything_changes(self, file: Path) -> None:
        least = fp.load(file).apply(Net(), "coded").resident_bytes
        assert fp.load(file).apply(Net(), "packed", max_memory=least).resident_bytes == least
        model = Net()
        with pytest.raises(
            fp.PlanError, match=f"max_memory is {least - 1}, and the model takes {least} bytes"
        ):
            fp.load(file).apply(model, "packed", max_memory=least - 1)
        assert not any(isinstance(layer, PackedLayer) for layer in model.modules())

    @pytest.mark.parametrize("mode", ["dense", "coded", "factored"])
    def test_modes_that_decide_nothing_take_none(self, file: Path, mode: str) -> None:
        with pytest.raises(fp.PlanError, match=f"for modes 'packed' and 'auto', and the mode is '{mode}'"):
            fp.load(file).apply(Net(), mode, max_memory=1 << 20)  # type: ignore[arg-type]

    def test_auto_chooses_within_it(self, file: Path) -> None:
        dense = resident_bytes(Net())
        least = fp.load(file).apply(Net(), "coded").resident_bytes
        for limit in (dense, dense // 2, 2 * least):
            model = Net()
            applied = fp.load(file).apply(model, "auto", example=TOKENS, max_memory=limit)
            assert applied.resident_bytes <= limit
            assert_same_tensor(model(TOKENS), fp.load(file).load_into(Net())(TOKENS))
            assert set(applied.layers[1].seconds) == {"dense", "packed", "coded"}

    def test_auto_without_a_limit_does_not_measure_what_is_never_fastest(self, file: Path) -> None:
        applied = fp.load(file).apply(Net(), "auto", example=TOKENS)
        assert set(applied.layers[1].seconds) == {"dense", "packed"}


# In 100 MB of data beyond what the program itself has, of which threads take some. FP32 takes 201 MB.
SCRIPT = """
import re, resource, sys
from pathlib import Path
import torch
from torch import nn
import factorpack as fp

torch.set_num_threads(2)

def build():
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(48)])

one = fp.load(sys.argv[1])
inputs = torch.ones(1, 1024)
with torch.inference_mode():
    nn.Linear(1024, 1024)(inputs)  # starts torch's threads
    held = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_DATA, (held + 100_000_000,) * 2)
    model = one.apply(build(), "coded").model
    for _ in range(2):
        found = model(inputs)
    print(float(found.double().sum()), flush=True)
    try:
        one.apply(build(), "dense")
    except (MemoryError, RuntimeError) as error:
        print(f"dense: {error}")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_a_model_larger_than_memory_runs(tmp_path: Path) -> None:
    encoded = fp.Scalar(4).encode(Weight(seeded(1024, 1024) / 16))
    row, stream = stored("0.weight", encoded)
    with Writer(tmp_path / "large.safetensors") as writer:
        for number in range(48):
            writer.put(replace(row, name=f"{number}.weight"), stream)
    done = run_forked([sys.executable, "-c", SCRIPT, tmp_path / "large.safetensors"], check=True)
    total, failure = done.stdout.strip().splitlines()
    weight = decode(encoded)
    expected = torch.ones(1, 1024)
    for _ in range(48):
        expected = nn.functional.linear(expected, weight)
    assert float(total) == pytest.approx(float(expected.double().sum()), rel=1e-4)
    assert "dense:" in failure
    assert "memory" in failure
