"""Layers that hold codes: the answers of decoded weights, bit for bit, and nothing else changes."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.measure import allocated_bytes
from factorpack.batches import device_of
from factorpack.decoding import decode
from factorpack.errors import FormatError
from factorpack.kinds import KINDS
from factorpack.runtime.bit_planes import bit_plane_bytes
from factorpack.runtime.packed_layers import PackedLayer, PackedLinear
from factorpack.runtime.packed_weight import PackedWeight
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_tensor, seeded
from tests.runtime.layer_cases import LAYERS, METHODS, both, compress


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_a_packed_layer_answers_as_a_decoded_one(layer: str, method: str) -> None:
    module, inputs = LAYERS[layer]
    applied, found, expected = both(module, METHODS[method], "packed", inputs)
    held = applied.model[0]  # type: ignore[index]
    if applied.layers[0].mode == "packed":
        assert isinstance(held, PackedLayer)
        assert "weight" not in dict(held.named_parameters())
    assert isinstance(held, type(module))
    assert held.extra_repr() == module.extra_repr()
    assert_close(found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_weight_comes_back_as_it_was_encoded(method: str) -> None:
    encoded = METHODS[method].encode(Weight(seeded(16, 8, 3, 3)))
    weight = PackedWeight(encoded, torch.empty(0))
    for name, part in encoded.parts.items():
        assert_same_tensor(weight.part(name).contiguous(), part)
    assert_close(weight(), decode(encoded))
    assert KINDS[encoded.kind].is_coded


def test_bytes_in_memory_are_those_of_the_codes_and_the_rest() -> None:
    encoded = fp.QSPCA(8, 3, tile=16).encode(Weight(seeded(64, 32)))
    weight = PackedWeight(encoded, torch.empty(0))
    codes = sum(bit_plane_bytes(encoded.parts[name].numel(), bits) for name, bits in encoded.bits.items())
    others = sum(part.nbytes for name, part in encoded.parts.items() if name not in encoded.bits)
    assert sum(buffer.nbytes for buffer in weight.buffers()) == codes + others
    model = nn.Sequential(nn.Linear(32, 64))
    packed = compress(model, fp.QSPCA(8, 3, tile=16))
    applied = packed.apply(model, "packed")
    assert applied.resident_bytes == codes + others + 4 * 64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10)
    ).eval()


@pytest.fixture(params=["packed", "factored"])
def applied(request: pytest.FixtureRequest) -> nn.Module:
    model = net()
    return compress(model, fp.QSPCA(4, 4, tile=9)).apply(model, request.param).model


IMAGES = seeded(2, 4, 4, 4)


def test_a_state_dict_goes_into_another_packed_model(applied: nn.Module) -> None:
    other = net()
    torch.manual_seed(1)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    mode = "factored" if "Factored" in repr(applied) else "packed"
    twin = compress(other, fp.QSPCA(4, 4, tile=9)).apply(other, mode).model  # type: ignore[arg-type]
    assert not torch.equal(twin(IMAGES), applied(IMAGES))
    twin.load_state_dict(applied.state_dict())
    assert_same_tensor(twin(IMAGES), applied(IMAGES))


def test_copies_and_pickles_answer_alike_and_are_their_own(applied: nn.Module) -> None:
    expected = applied(IMAGES)
    file = io.BytesIO()
    torch.save(applied, file)
    file.seek(0)
    for twin in (copy.deepcopy(applied), torch.load(file, weights_only=False)):
        assert_same_tensor(twin(IMAGES), expected)
        for buffer in twin.buffers():
            buffer.zero_()
    assert_same_tensor(applied(IMAGES), expected)


def test_inference_mode_and_gradients_of_what_is_left(applied: nn.Module) -> None:
    with torch.inference_mode():
        assert_close(applied(IMAGES), applied(IMAGES))
    inputs = IMAGES.clone().requires_grad_()
    applied(inputs).sum().backward()
    assert inputs.grad is not None
    assert applied[4].bias.grad is not None  # type: ignore[index,union-attr]


def test_autocast_rebuilds_in_full_and_multiplies_in_half(applied: nn.Module) -> None:
    expected = applied(IMAGES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = applied(IMAGES)
        weight = applied[4].weight  # type: ignore[index]
    assert found.dtype == torch.bfloat16
    assert_close(found, expected, torch.bfloat16)
    assert_same_tensor(weight, applied[4].weight)  # type: ignore[index,arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_type_changes_the_weight_and_not_the_numbers_behind_it(
    applied: nn.Module, dtype: torch.dtype
) -> None:
    expected, weight = applied(IMAGES), applied[4].weight  # type: ignore[index]
    changed = copy.deepcopy(applied).to(dtype)
    assert_same_tensor(changed[4].weight, weight.to(dtype))  # type: ignore[index,arg-type,operator]
    found = changed(IMAGES.to(dtype))
    assert found.dtype == dtype
    assert_close(found, expected, torch.float32 if dtype == torch.float64 else dtype)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_it_compiles_in_one_graph_that_does_not_look_into_the_codes(applied: nn.Module) -> None:
    graphs: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(applied, backend=seen, fullgraph=True)
    assert_close(compiled(IMAGES), applied(IMAGES))
    assert len(graphs) == 1
    assert "unpack_codes" in graphs[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["levels", "codewords", "scalar"])
def test_kinds_with_tables_compile_too(method: str) -> None:
    model = nn.Sequential(nn.Linear(24, 10))
    applied = compress(model, METHODS[method]).apply(model, "packed").model
    compiled = torch.compile(applied, backend="eager", fullgraph=True)
    assert_close(compiled(seeded(2, 24)), applied(seeded(2, 24)))


def test_it_exports(applied: nn.Module) -> None:
    exported = torch.export.export(applied, (IMAGES,))
    assert_close(exported.module()(IMAGES), applied(IMAGES))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")
def test_it_can_be_wrapped_for_several_processes(applied: nn.Module) -> None:
    wrapped = nn.parallel.DistributedDataParallel(applied)
    assert_close(wrapped(IMAGES), applied(IMAGES))
    wrapped(IMAGES).sum().backward()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        answers: Tensor = self.head(self.embed(tokens))
        return answers


def test_tied_layers_share_their_codes() -> None:
    model, tokens = Tied(), torch.tensor([[1, 2, 19]])
    packed = compress(model, fp.Scalar(4))
    expected = packed.load_into(copy.deepcopy(model))(tokens)
    applied = packed.apply(model, "packed")
    assert model.embed.packed is model.head.packed
    assert applied.resident_bytes == 20 * 16 // 2 + 20 * 2
    assert_close(model(tokens), expected)
    assert [layer.name for layer in applied.layers] == ["embed.weight", "head.weight"]


def test_one_layer_under_two_names_is_packed_once() -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    packed = compress(model, fp.Scalar(4))
    expected = packed.load_into(copy.deepcopy(model))(seeded(2, 16))
    assert len(packed.apply(model, "packed").layers) == 1
    assert isinstance(layer, PackedLinear)
    assert_close(model(seeded(2, 16)), expected)


def test_a_model_of_codes_alone_still_says_where_it_is() -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    compress(model, fp.Scalar(4)).apply(model, "packed")
    assert not list(model.parameters())
    assert device_of(model.to("meta")).type == "meta"


def test_a_hook_a_user_had_set_still_runs() -> None:
    model, seen = nn.Sequential(nn.Linear(16, 8)), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    compress(model, fp.Scalar(4)).apply(model, "packed")
    model(seeded(1, 16))
    assert seen == [1]


def test_indices_beyond_a_table_are_refused_before_anything_runs() -> None:
    encoded = fp.methods.TTQ().encode(Weight(seeded(8, 8)))
    encoded.parts["codes"][0, 0] = -2
    with pytest.raises(FormatError, match="3 levels allow -1 to 1"):
        PackedWeight(encoded, torch.empty(0))


def test_it_holds_what_a_file_holds(tmp_path: Path) -> None:
    packed = compress(net(), fp.QSPCA(4, 4, tile=9))
    fp.save(packed, tmp_path / "net.safetensors")
    model = net()
    fp.load(tmp_path / "net.safetensors").apply(model, "packed")
    found = model[4].packed.encoded()
    assert_same_tensor(found.parts["latent"].contiguous(), packed["4.weight"].parts["latent"])
    assert_close(decode(found), decode(packed["4.weight"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_an_embedding_rebuilds_the_rows_it_is_asked_for(
    method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For kinds whose tiles lie inside a row; others need the whole table."""
    model = nn.Sequential(nn.Embedding(40, 24)).to(dtype)
    packed = compress(model, METHODS[method])
    table = packed.load_into(copy.deepcopy(model))[0].weight  # type: ignore[index]
    held = packed.apply(model, "packed").model[0]  # type: ignore[index]
    index = torch.tensor([[3, 39, 0], [3, 17, 17]])
    across_rows = method in ("codewords", "spatial")
    if not across_rows:
        monkeypatch.setattr(PackedWeight, "forward", lambda _: pytest.fail("the whole table was rebuilt"))
    assert held.packed.has_rows != across_rows
    assert_close(held(index), table[index], dtype)
    assert held(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 24)
    for wrong in (-1, 40):
        with pytest.raises(IndexError, match="out of range"):
            held(torch.tensor([0, wrong]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["factors", "scalar"])
def test_an_embedding_compiles(method: str) -> None:
    model = nn.Sequential(nn.Embedding(40, 24))
    applied = compress(model, METHODS[method]).apply(model, "packed").model
    index = torch.tensor([[3, 39, 0]])
    expected = applied(index)
    torch._dynamo.reset()
    assert_close(torch.compile(applied, backend="eager", fullgraph=True)(index), expected)


def test_an_embedding_of_as_many_positions_as_rows_takes_the_table_once() -> None:
    model = nn.Sequential(nn.Embedding(6, 8))
    packed = compress(model, fp.Scalar(4))
    expected = packed.load_into(copy.deepcopy(model))
    index = torch.arange(24).reshape(4, 6) % 6
    assert_close(packed.apply(model, "packed").model(index), expected(index))


def test_nothing_wider_than_the_weight_is_there_while_it_is_rebuilt() -> None:
    """Peak by torch's own count of allocations: the weight and a piece, not the weight and its factors."""
    for method in (
        fp.SecondOrder(step=0.2, tile=9),
        fp.methods.SVD(rank=8),
        fp.Scalar(5),
        fp.QSPCA(32, 4, tile=64),
    ):
        encoded = method.encode(Weight(seeded(512, 256, 3, 3)))
        weight = PackedWeight(encoded, torch.empty(0))
        assert allocated_bytes(weight) < 1.4 * 4 * encoded.numel, method
