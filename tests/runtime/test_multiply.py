"""Products with packed codes: the operator against FP64, and layers that hold their codes in rows."""

from __future__ import annotations

import copy
import dataclasses
import io
import sys
import types
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import factorpack as fp
from factorpack.decoding import decode
from factorpack.runtime import multiply
from factorpack.runtime.code_rows import WIDTHS, pack_rows, unpack_rows
from factorpack.runtime.factored import FactoredLinear
from factorpack.runtime.multiply import multiply_codes, multiply_reference, why_no_kernel
from factorpack.runtime.packed_layers import PackedLinear, hold_packed
from factorpack.runtime.packed_weight import PackedWeight
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_tensor, seeded
from tests.runtime.layer_cases import compress
from tests.runtime.test_code_rows import random_codes


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal but for a few roundings to a type: closer than `assert_close`, whose 256 are all of BF16."""
    limit = 4 * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    assert found.shape == expected.shape
    assert (found.double() - expected.double()).norm() <= limit * expected.double().norm()


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(
    st.sampled_from(WIDTHS),
    st.integers(1, 9),
    st.integers(1, 300),
    st.integers(0, 5),
    st.sampled_from(DTYPES),
    st.sampled_from([None, "one", "row"]),
)
def test_the_operator_is_the_product_in_float64(
    bits: int, rows: int, columns: int, batch: int, dtype: torch.dtype, scales: str | None
) -> None:
    codes, inputs = random_codes(bits, rows, columns), seeded(batch, columns, dtype=dtype)
    scale = None if scales is None else seeded(1 if scales == "one" else rows, seed=1).half()
    expected = inputs.double() @ codes.double().T * (1.0 if scale is None else scale.double())
    found = multiply_codes(inputs, pack_rows(codes, bits), bits, scale)
    assert found.dtype == dtype
    assert_near(found, expected, dtype)


def test_few_rows_are_unpacked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, inputs, scale = random_codes(4, 23, 100), seeded(3, 100), seeded(23, seed=1)
    packed = pack_rows(codes, 4)
    whole = multiply_reference(inputs, packed, 4, scale)
    unpacked: list[int] = []

    def watched(some: Tensor, bits: int, columns: int) -> Tensor:
        unpacked.append(len(some))
        return multiply.unpack_rows(some, bits, columns)  # type: ignore[no-any-return]

    monkeypatch.setattr(multiply, "CODES_AT_A_TIME", 500)
    monkeypatch.setattr(multiply, "unpack_rows_reference", watched)
    assert_close(multiply_reference(inputs, packed, 4, scale), whole)
    assert unpacked == [5, 5, 5, 5, 3]


def test_rows_of_other_codes_are_refused_before_a_kernel_reads_them() -> None:
    packed = pack_rows(random_codes(4, 9, 40), 4)
    with pytest.raises(
        fp.WeightError, match=r"shape \(9, 32\) for rows of 70 codes of 4 bits, expected 64 bytes per row"
    ):
        multiply_codes(seeded(1, 70), packed, 4, None)
    with pytest.raises(fp.WeightError, match="codes of 5 bits, rows can have 2, 3, 4, 8"):
        unpack_rows(packed, 5, 40)
    with pytest.raises(fp.WeightError, match=r"scales of shape \(3,\) for 9 rows"):
        multiply_codes(seeded(1, 40), packed, 4, seeded(3))


@pytest.mark.parametrize("scale", [None, seeded(9, seed=1)])
def test_the_operator_keeps_the_rules_of_operators(scale: Tensor | None) -> None:
    """Its fake twin says the right shape and type, its gradient traces, and nothing aliases its input."""
    packed = pack_rows(random_codes(3, 9, 40), 3)
    torch.library.opcheck(multiply_codes, (seeded(2, 40).requires_grad_(), packed, 3, scale))


@pytest.mark.parametrize("scale", [None, seeded(9, seed=1), seeded(1, seed=1)])
def test_gradients_are_those_of_the_weight(scale: Tensor | None) -> None:
    codes, inputs = random_codes(4, 9, 40), seeded(2, 40).requires_grad_()
    answers = multiply_codes(inputs, pack_rows(codes, 4), 4, scale)
    answers.backward(seeded(2, 9, seed=2))
    weight = codes.double() * (1.0 if scale is None else scale.double()[:, None])
    assert_close(inputs.grad, seeded(2, 9, seed=2).double() @ weight)  # type: ignore[arg-type]


def test_what_the_kernel_cannot_take_is_said_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch.float32, the kernel takes torch.float16" in why_no_kernel(seeded(1, 4))
    monkeypatch.setattr(multiply, "has_triton", lambda: False)
    assert "needs triton, which is not installed" in why_no_kernel(seeded(1, 4).half())
    monkeypatch.setattr(multiply, "has_triton", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "compute capability 8.0, this one has 7.5" in why_no_kernel(seeded(1, 4).half())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert why_no_kernel(seeded(1, 4).half()) == ""


def test_falling_back_warns_once_and_answers_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiply, "on_gpu", lambda _: True)
    multiply.warn_once.cache_clear()
    codes, inputs = random_codes(4, 9, 40), seeded(2, 40)
    with pytest.warns(
        UserWarning, match="computed in plain torch, which is slower: inputs are torch.float32"
    ):
        found = multiply_codes(inputs, pack_rows(codes, 4), 4, None)
    assert_close(found, inputs.double() @ codes.double().T)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_tensor(multiply_codes(inputs, pack_rows(codes, 4), 4, None), found)
    multiply.warn_once.cache_clear()


class Unsuited(Exception):
    """Stands for what triton raises."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for the kernel's module, on what passes for a GPU."""
    module = types.SimpleNamespace(UNSUITED=(Unsuited,), multiply_rows=lambda *_: torch.full((1,), 7.0))
    monkeypatch.setitem(sys.modules, "factorpack.runtime.multiply_triton", module)  # type: ignore[arg-type]
    monkeypatch.setattr(multiply, "on_gpu", lambda _: True)
    monkeypatch.setattr(multiply, "why_no_kernel", lambda _: "")
    multiply.warn_once.cache_clear()
    return module


@pytest.mark.usefixtures("stand_in")
def test_the_kernel_takes_small_batches_that_are_not_empty() -> None:
    packed = pack_rows(random_codes(4, 9, 40), 4)
    used = {
        size: multiply_codes(seeded(size, 40), packed, 4, None).tolist() == [7.0]
        for size in (0, 1, 1024, 1025)
    }
    assert used == {0: False, 1: True, 1024: True, 1025: False}


def test_a_kernel_that_does_not_fit_the_gpu_is_done_without(stand_in: types.SimpleNamespace) -> None:
    def too_large(*_: object) -> Tensor:
        raise Unsuited("out of shared memory")

    stand_in.multiply_rows = too_large
    codes, inputs = random_codes(4, 9, 40), seeded(2, 40)
    with pytest.warns(UserWarning, match=r"does not suit this GPU or triton \(out of shared memory\)"):
        found = multiply_codes(inputs, pack_rows(codes, 4), 4, None)
    assert_close(found, inputs.double() @ codes.double().T)


METHODS = {
    "factors": (fp.QSPCA(16, 4, tile=32), "factored", FactoredLinear),
    "factors about no mean": (fp.QSPCA(32, 3, tile=32, center=False), "factored", FactoredLinear),
    "factors a column": (fp.QSPCA(16, 4, tile=32, latent_scales="column"), "factored", FactoredLinear),
    "factors rebuilt": (fp.QSPCA(16, 4, tile=32), "packed", PackedLinear),
    "scalar": (fp.Scalar(4), "packed", PackedLinear),
    "one scale": (fp.methods.LSQ(3, channels=False), "packed", PackedLinear),
}
INPUTS = seeded(2, 3, 512)


@pytest.fixture(params=METHODS)
def layers(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model of one layer whose codes lie in rows, and the same with the weight they make."""
    method, mode, cls = METHODS[request.param]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 24))
    packed = compress(model, method)
    dense = packed.load_into(copy.deepcopy(model))
    applied = packed.apply(model, mode).model  # type: ignore[arg-type]
    assert type(applied[0]) is cls  # type: ignore[index]
    assert applied[0].packed.in_rows  # type: ignore[index,union-attr]
    return applied, dense


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_answer_as_their_weight(
    layers: tuple[nn.Module, nn.Module], dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factorpack.runtime.packed_layers.on_gpu", lambda _: kernel)
    model, dense = layers
    expected = dense.double()(INPUTS.double())
    found = model.to(dtype)(INPUTS.to(dtype))
    assert found.dtype == dtype
    assert_near(found, expected, dtype)
    assert_near(model[0].weight, dense[0].weight, dtype)  # type: ignore[index,arg-type]


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_layers_compile_export_and_take_mixed_precision(
    layers: tuple[nn.Module, nn.Module], kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factorpack.runtime.packed_layers.on_gpu", lambda _: kernel)
    model, dense = layers
    expected = dense(INPUTS)
    torch.compiler.reset()  # the cases share code, which may be compiled so many times
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(INPUTS), expected)
    assert_close(torch.export.export(model, (INPUTS,)).module()(INPUTS), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(INPUTS)
    assert found.dtype == torch.bfloat16
    assert_near(found, expected, torch.bfloat16)
    inputs = INPUTS.clone().requires_grad_()
    model(inputs).sum().backward()
    assert_close(inputs.grad, dense[0].weight.sum(0).expand_as(inputs))  # type: ignore[arg-type,index,operator,union-attr]


def test_what_is_folded_follows_the_state_and_is_no_part_of_it(layers: tuple[nn.Module, nn.Module]) -> None:
    model, _ = layers
    assert not any("folded" in name for name in model.state_dict())
    other = copy.deepcopy(model)
    for buffer in other[0].packed.buffers():  # type: ignore[index,union-attr]
        buffer.zero_()
    other.load_state_dict(model.state_dict())
    assert_same_tensor(other(INPUTS), model(INPUTS))
    assert_same_tensor(other.bfloat16().float()[0].packed(), model[0].packed())  # type: ignore[index,operator,union-attr]
    other[0].bias = model[0].bias  # type: ignore[index,union-attr]
    assert_same_tensor(other(INPUTS), model(INPUTS))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_same_tensor(torch.load(file, weights_only=False)(INPUTS), model(INPUTS))


@pytest.mark.parametrize(
    ("method", "columns", "why"),
    [
        (fp.Scalar(5), 512, "a width that no cell is made of"),
        (fp.Scalar(4), 70, "rows that would be filled up by much"),
        (fp.QSPCA(4, 4, tile=24), 512, "tiles that lie in two rows"),
    ],
)
def test_other_codes_stay_as_they_were(method: fp.Scalar | fp.QSPCA, columns: int, why: str) -> None:
    encoded = method.encode(Weight(seeded(24, columns)))
    weight = PackedWeight(encoded, torch.empty(0))
    assert not weight.in_rows, why
    assert_close(weight(), decode(encoded))


def test_a_weight_that_its_type_would_clamp_is_rebuilt() -> None:
    encoded = fp.Scalar(4).encode(Weight(seeded(24, 512).half()))
    assert PackedWeight(encoded, torch.empty(0)).in_rows
    encoded.parts["scale"][3] = 60000.0
    assert not PackedWeight(encoded, torch.empty(0)).in_rows


def test_rows_take_the_bytes_of_their_codes() -> None:
    scalar = PackedWeight(fp.Scalar(4).encode(Weight(seeded(24, 512))), torch.empty(0))
    assert sum(buffer.nbytes for buffer in scalar.buffers()) == 24 * 512 // 2 + 24 * 2
    encoded = fp.QSPCA(16, 3, tile=32, center=False).encode(Weight(seeded(24, 512)))
    factors = PackedWeight(encoded, torch.empty(0))
    assert factors.latent.nbytes == 24 * 256 * 3 // 8  # type: ignore[union-attr,operator]
    before = sum(buffer.nbytes for buffer in factors.buffers())
    factors.fold()
    assert sum(buffer.nbytes for buffer in factors.buffers()) == before + 32 * 16 * 4


def test_a_layer_goes_where_there_is_no_data(layers: tuple[nn.Module, nn.Module]) -> None:
    model, _ = layers
    assert {buffer.device.type for buffer in model.to("meta").buffers()} == {"meta"}


def test_mixed_precision_finds_the_scales_that_fp16_does_not_hold() -> None:
    encoded = fp.QSPCA(16, 4, tile=32, center=False).encode(Weight(seeded(24, 512)))
    small = {name: part.float() * 1e-6 if "scale" in name else part for name, part in encoded.parts.items()}
    encoded = dataclasses.replace(encoded, parts=small)
    layer = nn.Linear(512, 24, bias=False).half()
    hold_packed(layer, FactoredLinear, PackedWeight(encoded, layer.weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(INPUTS)
    assert_near(found, INPUTS.double() @ decode(encoded).double().T, torch.bfloat16)
