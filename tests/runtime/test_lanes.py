"""Codes in lanes: the reference decoder gives them back, and they take little more than their entropy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import factorpack as fp
from factorpack.decoding import decode
from factorpack.errors import WeightError
from factorpack.runtime import lane_decode, lane_models, lanes, nvrtc, packed_weight
from factorpack.runtime.lane_decode import decode_lanes, decode_reference, multiply_lanes, uses_lanes
from factorpack.runtime.lane_models import Models
from factorpack.runtime.lanes import LaneLayout, pack_lanes
from factorpack.runtime.packed_layers import PackedEmbedding, PackedLinear, hold_packed
from factorpack.runtime.packed_weight import PackedWeight
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_tensor, seeded
from tests.runtime.layer_cases import LAYERS, METHODS, both, compress


def normal(rows: int, columns: int, scale: float, spread: float = 0.0, seed: int = 0) -> np.ndarray:
    """Rounded normal numbers, int16; columns differ in scale by up to 2^spread."""
    random = np.random.default_rng(seed)
    by_column = scale * np.exp2(random.uniform(-spread, 0, columns))
    return np.round(random.standard_normal((rows, columns)) * by_column).astype(np.int16)


def entropy_bytes(codes: np.ndarray) -> float:
    counts = np.unique(codes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / codes.size)).sum() / 8)


def fitted(codes: np.ndarray) -> tuple[Models, float]:
    ends = int(codes.min()), int(codes.max())
    choice = lane_models.choose_models(torch.from_numpy(codes), *ends)
    return choice.fit(torch.from_numpy(codes), *ends), choice.size


def numbers(layout: LaneLayout) -> list[int]:
    return [int(getattr(layout, name)) for name in layout.__slots__]


@settings(max_examples=20)
@given(
    st.integers(1, 70),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.3, 1.0, 6.0, 90.0, 400.0]),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_reference_gives_the_codes_back(
    rows: int, columns: int, scale: float, narrow: bool, seed: int
) -> None:
    codes = normal(rows, columns, scale, seed=seed).clip(-2048, 2047)
    if narrow:
        codes = codes.clip(-128, 127).astype(np.int8)
    packed, layout = pack_lanes(torch.from_numpy(codes), columns)
    assert layout.count == codes.size
    found = decode_reference(packed, layout, torch.from_numpy(codes).dtype)
    assert np.array_equal(found.numpy(), codes.reshape(-1))


CASES = {
    "pairs": normal(700, 256, 1.0).astype(np.int8),
    "single": normal(700, 255, 1.0),
    "classes": normal(600, 300, 30.0, spread=6.0),
    "patches": np.where(normal(400, 200, 1.0, seed=1) > 2, normal(400, 200, 300.0), 0).astype(np.int16),
    "zeros": np.zeros((300, 200), np.int8),
    "the widest codes": np.array([[-2048, 2047, -2, -1]] * 30, np.int16),
    "one": np.array([[-5]], np.int8),
}


@pytest.mark.parametrize("large", [0, 1 << 22])
@pytest.mark.parametrize("case", CASES)
def test_every_way_of_coding_gives_the_codes_back(
    case: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_models, "LARGE", large)
    if case == "pairs":  # so few codes are not worth their table
        monkeypatch.setattr(lanes, "PAIR_MARGIN", {0: 9.0})
    codes = CASES[case]
    packed, layout = pack_lanes(torch.from_numpy(codes), codes.shape[1])
    assert np.array_equal(decode_reference(packed, layout, torch.int16).numpy(), codes.reshape(-1))
    found = {
        "pairs": layout.is_pair,
        "single": not layout.is_pair and layout.models == 1,
        "classes": layout.models > 1,
        "patches": layout.has_patches,
    }
    assert found.get(case, True)
    assert layout.is_indirect == (large > 0 and not layout.is_pair and case != "the widest codes")


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0])
def test_lanes_take_little_more_than_the_entropy(scale: float) -> None:
    codes = normal(1024, 1024, scale).astype(np.int8)
    packed, _ = pack_lanes(torch.from_numpy(codes), 1024)
    assert packed.numel() < 1.035 * entropy_bytes(codes)


def test_columns_of_different_scales_have_models_of_their_own() -> None:
    codes = normal(2048, 128, 60.0, spread=7.0)
    packed, layout = pack_lanes(torch.from_numpy(codes), 128)
    assert layout.models > 1
    assert packed.numel() < 0.95 * entropy_bytes(codes)


def test_rows_are_cut_otherwise_only_where_they_are_free() -> None:
    codes = normal(8, 4096, 1.0).astype(np.int8)
    free, layout = pack_lanes(torch.from_numpy(codes), 4096)
    held, as_given = pack_lanes(torch.from_numpy(codes), 4096, free=False)
    assert as_given.columns == 4096 > layout.columns
    assert free.numel() < held.numel()


def test_codes_that_a_patch_cannot_hold_are_refused() -> None:
    with pytest.raises(WeightError, match="codes 0 to 2048, lanes can have -2048 to 2047"):
        pack_lanes(torch.tensor([[0, 2048]], dtype=torch.int16), 2)


def test_frequencies_of_every_model_fill_its_table() -> None:
    models, _ = fitted(normal(300, 90, 20.0, spread=5.0))
    assert isinstance(models, Models)
    slots = 1 << models.table_bits
    assert (models.frequencies.sum(1) == slots).all()
    entries = replace(models, is_indirect=False).table().view(np.uint32).reshape(len(models.frequencies), -1)
    read, base = entries & 63, entries >> 18
    # Whatever bits are read, the next state is a slot; and each slot is the next state of every symbol once.
    assert (base << read >= slots).all()
    assert ((base + 1) << read <= 2 * slots).all()
    for own, numbers, frequencies in zip(entries, models.numbers(), models.frequencies, strict=True):
        for symbol in np.flatnonzero(frequencies):
            its = own[numbers == symbol]
            assert sorted(its >> 18) == list(range(len(its), 2 * len(its)))
            assert (1 << (its & 63)).sum() == slots


@pytest.mark.parametrize("spread", [2.0, 5.0])
def test_numbers_of_symbols_are_enough_to_make_entries(spread: float) -> None:
    models, _ = fitted(normal(900, 90, 30.0, spread=spread))
    direct = replace(models, is_indirect=False).table().view(np.uint32).reshape(len(models.frequencies), -1)
    numbers = replace(models, is_indirect=True).table().reshape(direct.shape)
    found = lane_models.entries_of(numbers, models.table_bits, models.raw_bits, models.low, is_pair=False)
    assert np.array_equal(found, direct)


def test_models_of_large_matrices_are_judged_by_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are all alike look different in a few rows, and only in these."""
    monkeypatch.setattr(lane_models, "LARGE", 1 << 16)
    monkeypatch.setattr(lane_models, "_SAMPLE_OF_LARGE", 1 << 14)
    codes = normal(512, 1024, 1.0)
    models, size = fitted(codes)
    assert len(models.frequencies) == 1
    assert size > 0.999 * entropy_bytes(codes)


def test_lanes_of_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some with nearly no words, beside some with hundreds."""
    monkeypatch.setattr(lanes, "LANE_BITS", {0: 20000})
    for scale in (0.1, 0.5, 100.0):
        codes = normal(2000, 128, scale)
        codes[:, ::2] = 0
        packed, layout = pack_lanes(torch.from_numpy(codes), 128, free=False)
        assert np.array_equal(decode_reference(packed, layout, torch.int16).numpy(), codes.reshape(-1))


@pytest.mark.parametrize("scaled", ["one", "row", "column"])
def test_the_operator_scales_as_a_dense_weight_is(scaled: str) -> None:
    codes = normal(90, 40, 3.0).astype(np.int8)
    packed, layout = pack_lanes(torch.from_numpy(codes), 40, free=False)
    shape = {"one": (1, 1), "row": (90, 1), "column": (1, 40)}[scaled]
    scale = seeded(*shape).abs().half()
    found = decode_lanes(packed, numbers(layout), scale, scaled, torch.bfloat16, torch.float32)
    expected = (torch.from_numpy(codes).float() * scale.float()).bfloat16()
    assert_same_tensor(found.view(90, 40), expected)


def test_a_vector_is_multiplied_as_by_the_codes() -> None:
    codes = normal(90, 40, 3.0).astype(np.int8)
    packed, layout = pack_lanes(torch.from_numpy(codes), 40, free=False)
    inputs, scale = seeded(90).bfloat16(), seeded(40).abs()
    found = multiply_lanes(inputs, packed, numbers(layout), scale)
    assert_close(found, inputs.double() @ torch.from_numpy(codes).double() * scale, torch.bfloat16)


@pytest.fixture
def in_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but decoded by the reference."""
    monkeypatch.setattr(packed_weight, "uses_lanes", lambda _: True)
    monkeypatch.setattr(packed_weight, "FEWEST_IN_LANES", 1)
    monkeypatch.setattr(packed_weight, "ROWS_MARGIN", 0.0)


@pytest.mark.usefixtures("in_lanes")
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_in_lanes_answer_as_dense_ones(layer: str) -> None:
    module, inputs = LAYERS[layer]
    applied, found, expected = both(module, fp.Scalar(3), "packed", inputs)
    assert_close(found, expected)
    assert [each.mode for each in applied.layers] == ["packed"]


@pytest.mark.usefixtures("in_lanes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_weights_in_lanes_are_those_of_the_file_bit_for_bit(
    method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weight, "pack_lanes", smallest_first)
    for shape in ((40, 96), (24, 8, 3, 3)):
        encoded = METHODS[method].encode(Weight(seeded(*shape)))
        weight = PackedWeight(encoded, torch.empty(0, dtype=dtype))
        fitting = {name for name in encoded.bits if int(encoded.parts[name].abs().max()) < 2048}
        assert set(weight.lanes) == fitting
        assert_same_tensor(weight().contiguous(), decode(encoded).to(dtype))
        for name, part in encoded.parts.items():
            assert_same_tensor(weight.part(name).contiguous(), part.contiguous())


def smallest_first(codes: Tensor, columns: int, unit: int, free: bool) -> tuple[Tensor, LaneLayout]:
    """`pack_lanes` that never loses to a fixed width, by a length that it does not have."""
    packed, layout = pack_lanes(codes, columns, unit, free)
    return _Short(packed), layout


class _Short(Tensor):
    def numel(self) -> int:
        return 0


@pytest.mark.usefixtures("in_lanes")
def test_codes_are_in_lanes_only_where_these_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weight, "ROWS_MARGIN", 1.25)
    uniform = fp.Scalar(4).encode(Weight(torch.rand(256, 512) - 0.5))
    assert not PackedWeight(uniform, torch.empty(0)).lanes
    peaked = fp.Scalar(8, clip="minmax").encode(Weight(seeded(256, 512) ** 5))
    weight = PackedWeight(peaked, torch.empty(0))
    assert set(weight.lanes) == {"codes"}
    fixed = fp.Scalar(8, clip="minmax").encode(Weight(seeded(256, 512) ** 5)).numel
    assert weight.codes.numel() < fixed / 2
    assert "entropy-coded" in repr(weight)


@pytest.mark.usefixtures("in_lanes")
def test_a_model_in_lanes_moves_and_is_copied_and_stored() -> None:
    model = nn.Sequential(nn.Linear(96, 128))
    packed = compress(model, fp.Scalar(3))
    expected = packed.load_into(copy.deepcopy(model))
    applied = packed.apply(model, "packed").model
    inputs = seeded(2, 96)
    assert_close(applied(inputs), expected(inputs))
    assert_close(copy.deepcopy(applied)(inputs), expected(inputs))
    other = packed.apply(nn.Sequential(nn.Linear(96, 128)), "packed").model
    other.load_state_dict(applied.state_dict())
    assert_close(other(inputs), expected(inputs))
    assert_close(applied.half()(inputs.half()), expected(inputs), torch.float16)


@pytest.mark.usefixtures("in_lanes")
@pytest.mark.filterwarnings("ignore")
def test_a_layer_in_lanes_compiles() -> None:
    model = nn.Sequential(nn.Linear(96, 128), nn.Embedding(3, 4))
    applied = compress(model, fp.Scalar(3)).apply(model, "packed").model
    inputs = seeded(1, 96)
    expected = applied[0](inputs)  # type: ignore[index]
    torch._dynamo.reset()
    compiled = torch.compile(applied[0], backend="eager", fullgraph=True)  # type: ignore[index]
    assert_close(compiled(inputs), expected)


@pytest.mark.usefixtures("in_lanes")
def test_a_linear_layer_multiplies_a_vector_without_rebuilding_its_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Linear(300, 128).bfloat16()
    encoded = fp.Scalar(3).encode(Weight(seeded(128, 300).bfloat16()))
    expected = nn.functional.linear(seeded(1, 1, 300), decode(encoded).float(), layer.bias.float())
    hold_packed(layer, PackedLinear, PackedWeight(encoded, layer.weight))
    monkeypatch.setattr("factorpack.runtime.packed_layers.on_gpu", lambda _: True)
    monkeypatch.setattr(PackedWeight, "forward", lambda _: pytest.fail("the weight was rebuilt"))
    with torch.inference_mode():
        found = layer(seeded(1, 1, 300).bfloat16())
    assert found.shape == (1, 1, 128)
    assert_close(found, expected, torch.bfloat16)


def test_a_gpu_that_cannot_decode_lanes_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_decode, "on_gpu", lambda _: True)
    lane_decode.warn_once.cache_clear()
    nvrtc.why_not.cache_clear()
    with pytest.warns(UserWarning, match="torch was built without CUDA"):
        assert not uses_lanes(torch.empty(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not uses_lanes(torch.empty(0))


def test_a_gpu_without_a_compiler_for_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    nvrtc.why_not.cache_clear()
    assert "8.0, this one has 7.5" in nvrtc.why_not(0)
    nvrtc.why_not.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(nvrtc, "_library_names", lambda: iter(["libnone.so"]))
    nvrtc._library.cache_clear()
    assert "no kernel could be compiled (libnone.so" in nvrtc.why_not(0)

    def refuse(*_: object) -> bytes:
        raise nvrtc.CudaError("NVRTC failed to compile nothing.cu: no such architecture")

    monkeypatch.setattr(nvrtc, "compile_source", refuse)
    nvrtc.why_not.cache_clear()
    assert "no such architecture" in nvrtc.why_not(0)
    nvrtc.why_not.cache_clear()


@pytest.mark.usefixtures("in_lanes")
def test_rows_of_a_table_are_columns_of_lanes_where_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded = fp.Scalar(8, clip="minmax").encode(Weight(seeded(1600, 96) ** 5))
    weight = PackedWeight(encoded, torch.empty(0, dtype=torch.bfloat16))
    expected = decode(encoded).bfloat16()
    asked: list[int] = []

    def columns(*arguments: object) -> Callable[[Tensor], Tensor]:
        assert arguments[3:] == ("column", torch.bfloat16, torch.float32)

        def gather(wanted: Tensor) -> Tensor:
            asked.append(len(wanted))
            return expected[wanted]

        return gather

    monkeypatch.setattr(packed_weight, "on_gpu", lambda _: True)
    monkeypatch.setattr(packed_weight, "columns_of", columns)
    layer = nn.Embedding(1600, 96).bfloat16()
    hold_packed(layer, PackedEmbedding, weight)
    few = torch.tensor([[3, 1599], [0, 3]])
    assert_same_tensor(layer(few), expected[few])
    assert asked == [4]
    monkeypatch.setattr(packed_weight, "on_gpu", lambda _: False)
    assert_same_tensor(layer(few), expected[few])
    assert asked == [4]
