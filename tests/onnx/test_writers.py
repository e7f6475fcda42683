"""Every kind: what the graph rebuilds is what the decoder gives, in a file of about the fixed width."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, checker, helper

from factorpack.budget.norms import constant
from factorpack.decoding import decode
from factorpack.kinds import KINDS
from factorpack.methods import QSPCA, SVD, TTQ, VQ, Keep, Scalar, SpatialSVD
from factorpack.onnx.proto import _nodes, _tensors
from factorpack.onnx.sketch import TYPES, Sketch, Type
from factorpack.onnx.writers import WRITERS, rebuild
from factorpack.quantize.uniform import code_dtype, code_range
from factorpack.record import Encoded
from factorpack.size import fixed_bits
from factorpack.weight import Weight
from tests.contract.test_contract import SETTINGS
from tests.helpers import assert_close, seeded
from tests.onnx.graphs import FOLDED, PLAIN, run

SHAPES = {"linear": ((24, 40), 0), "conv": ((16, 6, 3, 3), 0), "depthwise": ((16, 1, 3, 3), 0)}
SHAPES |= {"transposed": ((6, 4, 3, 5), 1), "grouped transposed": ((8, 4, 3), 4)}


def rebuilt(encoded: Encoded, optimised: bool = PLAIN, opset: int = 21) -> torch.Tensor:
    """The weight as onnxruntime computes it; it is added to a zero, since a graph without inputs is odd."""
    sketch = Sketch(opset)
    rebuild(sketch, encoded, TYPES[encoded.dtype], "weight")
    zero = helper.make_tensor_value_info("zero", TensorProto.FLOAT, [1])
    total = helper.make_tensor_value_info("total", TensorProto.FLOAT, list(encoded.shape))
    end = [
        helper.make_node("Cast", ["weight"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["wide", "zero"], ["total"]),
    ]
    graph = helper.make_graph([*_nodes(sketch), *end], "rebuilt", [zero], [total], _tensors(sketch))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    checker.check_model(model, full_check=True)
    return run(model.SerializeToString(), {"zero": torch.zeros(1)}, optimised)


def test_every_kind_has_a_writer() -> None:
    assert list(WRITERS) == list(KINDS)


def test_types_have_the_numbers_of_onnx() -> None:
    assert all(TensorProto.DataType.Value(each.name) == each for each in Type)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "method",
    [pytest.param(each, id=name) for name, settings in SETTINGS.items() for each in settings],
)
def test_the_graph_gives_what_the_decoder_gives(method: object, shape: str) -> None:
    size, groups = SHAPES[shape]
    encoded = method.encode(Weight(seeded(*size), groups, None))  # type: ignore[attr-defined]
    assert_close(rebuilt(encoded), decode(encoded).float())


@pytest.mark.parametrize("opset", [18, 21, 23])
@pytest.mark.parametrize(
    "method",
    [QSPCA(8, 4, tile=16), Scalar(4), Scalar(3), TTQ(channels=True), VQ(16, tile=7), SVD(4), SpatialSVD(4)],
    ids=lambda method: type(method).__name__,
)
def test_with_constants_folded_and_in_other_opsets(method: object, opset: int) -> None:
    encoded = method.encode(Weight(seeded(16, 6, 3, 3), 0, None))  # type: ignore[attr-defined]
    assert_close(rebuilt(encoded, FOLDED, opset), decode(encoded))


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("width", range(1, 17))
def test_codes_of_every_width_are_exact(width: int, opset: int) -> None:
    low, high = code_range(width)
    codes = torch.linspace(low, high, 33).round().to(code_dtype(width)).reshape(3, 11)
    scale = torch.ones(1, 1, dtype=torch.float16)
    encoded = Encoded("scalar", (3, 11), torch.float32, {"codes": codes, "scale": scale}, {"codes": width})
    assert torch.equal(rebuilt(encoded, opset=opset), codes.float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_are_rounded_and_clamped_as_the_decoder_does(dtype: torch.dtype) -> None:
    codes = torch.tensor([[100, -100, 3, 1]], dtype=torch.int8)
    scale = torch.tensor([[1000.1]])
    encoded = Encoded("scalar", (1, 4), dtype, {"codes": codes, "scale": scale}, {"codes": 8})
    assert torch.equal(rebuilt(encoded), decode(encoded).float())


@pytest.mark.parametrize(
    "encoded",
    [
        Keep("float16").encode(Weight(seeded(40))),
        Keep("bfloat16").encode(Weight(seeded(40))),
        constant(seeded(5, 3), 0.1),
        constant(seeded(40).half(), 0.1),
    ],
    ids=["half", "brain", "constant", "half constant"],
)
def test_values_and_constants_are_exact(encoded: Encoded) -> None:
    assert torch.equal(rebuilt(encoded), decode(encoded).float())


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("opset", [18, 21])
def test_codes_take_their_fixed_width(bits: int, opset: int) -> None:
    encoded = Scalar(bits).encode(Weight(seeded(64, 256)))
    sketch = Sketch(opset)
    rebuild(sketch, encoded, Type.FLOAT, "weight")
    stored = sum(len(each.data) for each in sketch.stored)
    assert 0 <= stored - sum(fixed_bits(encoded).values()) / 8 <= 128
