"""Z (C^T x) is (C Z)^T x: over shapes, ranks, tiles, groups and movements, with and without a mean."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import factorpack as fp
from factorpack.decoding import check, decode, specs
from factorpack.quantize.uniform import code_dtype, code_range
from factorpack.record import Encoded
from factorpack.runtime.factored import FACTORED, FactoredLayer, why_not_factored
from factorpack.runtime.packed_layers import hold_packed
from factorpack.runtime.packed_weight import PackedWeight
from factorpack.weight import Weight
from tests.helpers import assert_close, seeded
from tests.runtime.layer_cases import LAYERS, both


def random_factors(
    shape: tuple[int, ...], tile: int, rank: int, bits: int, scales: str, mean: bool
) -> Encoded:
    count = math.prod(shape) // tile
    generator = torch.Generator().manual_seed(rank + bits)

    def codes(width: int, *size: int) -> Tensor:
        low, high = code_range(width)
        return torch.randint(low, high + 1, size, generator=generator).to(code_dtype(width))

    scale = {"row": (rank, 1), "column": (1, count), "one": (1, 1)}[scales]
    parts = {
        "codebook": codes(4, tile, rank),
        "codebook_scale": seeded(1, rank, seed=1).abs().half(),
        "latent": codes(bits, rank, count),
        "latent_scale": seeded(*scale, seed=2).abs(),
    }
    if mean:
        parts["mean"] = seeded(tile, 1, seed=3)
    encoded = Encoded("factors", shape, torch.float32, parts, {"codebook": 4, "latent": bits})
    check("factors", encoded.layout, torch.float32, specs(encoded))
    return encoded


def answers(layer: nn.Module, encoded: Encoded, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the layer with its factors, and with the weight they make, in FP64."""
    weight = decode(encoded)
    layer = layer.double()
    layer.weight.data.copy_(weight)  # type: ignore[operator,union-attr]
    expected = layer(inputs.double()).detach()
    assert why_not_factored(layer, encoded) == ""
    hold_packed(layer, FACTORED[type(layer)], PackedWeight(encoded, layer.weight))  # type: ignore[arg-type]
    assert isinstance(layer, FactoredLayer)
    layer.packed.forward = None  # type: ignore[assignment,method-assign]  # the weight is never built
    return layer(inputs.double()), expected


SCALES, BITS = st.sampled_from(["row", "column", "one"]), st.sampled_from([2, 3, 4, 5, 8, 12])


@given(st.data(), SCALES, BITS, st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_linear(data: st.DataObject, scales: str, bits: int, mean: bool, bias: bool) -> None:
    tile, tiles, outputs = (data.draw(st.integers(1, 6)) for _ in range(3))
    rank = data.draw(st.integers(1, tile))
    batch = data.draw(st.sampled_from([(), (1,), (5,), (2, 3)]))
    encoded = random_factors((outputs, tile * tiles), tile, rank, bits, scales, mean)
    layer = nn.Linear(tile * tiles, outputs, bias=bias)
    assert_close(*answers(layer, encoded, seeded(*batch, tile * tiles)), torch.float32)


@given(st.data(), SCALES, BITS, st.booleans(), st.sampled_from(["zeros", "circular"]))
@settings(max_examples=80, deadline=None)
def test_convolutions(data: st.DataObject, scales: str, bits: int, mean: bool, padding_mode: str) -> None:
    dimensions, groups, blocks, channels = (data.draw(st.integers(1, 3)) for _ in range(4))
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(dimensions))
    tile = channels * math.prod(kernel)
    rank = data.draw(st.integers(1, min(tile, 5)))
    inputs, outputs = groups * blocks * channels, groups * data.draw(st.integers(1, 3))
    encoded = random_factors((outputs, blocks * channels, *kernel), tile, rank, bits, scales, mean)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](
        inputs,
        outputs,
        kernel,  # type: ignore[arg-type]
        stride=data.draw(st.integers(1, 2)),
        padding=data.draw(st.integers(0, 2)),
        dilation=data.draw(st.integers(1, 2)),
        groups=groups,
        padding_mode=padding_mode,
    )
    batch = data.draw(st.sampled_from([(1,), (2,)]))
    images = seeded(*batch, inputs, *(size + 4 for size in kernel))
    assert_close(*answers(layer, encoded, images), torch.float32)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tile", [8, 9, 24])
def test_a_layer_is_factored_or_says_why_not(layer: str, tile: int) -> None:
    applied, found, expected = both(LAYERS[layer][0], fp.QSPCA(4, 4, tile=tile), "factored", LAYERS[layer][1])
    report = applied.layers[0]
    assert report.mode in ("packed", "factored")
    assert (report.mode == "packed") == bool(report.note)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("layer", "method", "reason"),
    [
        ("linear", fp.Scalar(4), "stored as 'scalar'"),
        ("embedding", fp.QSPCA(4, 4, tile=8), "layers of class Embedding are not"),
        ("transposed", fp.QSPCA(4, 4, tile=9), "layers of class ConvTranspose2d are not"),
        ("conv2d", fp.QSPCA(4, 4, tile=8), "a tile of 8 does not divide a filter of 8 kernels of 9"),
    ],
)
def test_reasons(layer: str, method: fp.QSPCA | fp.Scalar, reason: str) -> None:
    applied, *_ = both(LAYERS[layer][0], method, "factored", LAYERS[layer][1])
    assert applied.layers[0].mode == "packed"
    assert reason in applied.layers[0].note


def test_fp16_is_left_to_the_weight_itself() -> None:
    """Scales of 1e-4 and sums of codes are beyond FP16; the weight that both make is not."""
    layer = nn.Linear(512, 8).half()
    encoded = random_factors((8, 512), 8, 4, 8, "row", False)
    encoded.parts["latent_scale"].mul_(1e-6)
    hold_packed(layer, FACTORED[nn.Linear], PackedWeight(encoded, layer.weight))
    inputs = seeded(2, 512).half()
    expected = inputs.double() @ decode(encoded).half().double().T + layer.bias.double()
    assert_close(layer(inputs), expected, torch.float16)
    assert "FP16" in why_not_factored(
        nn.Linear(512, 8), fp.QSPCA(4, 4, tile=8).encode(Weight(seeded(8, 512).half()))
    )
