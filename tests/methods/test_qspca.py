"""QSPCA: theory at its limits, exact counts, and the rules for weights that are too small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.methods import QSPCA
from factorpack.quantize.uniform import from_codes
from factorpack.record import Encoded
from factorpack.tiles import tile_count
from factorpack.weight import Weight
from tests.helpers import assert_close, relative_error, seeded, shared_weights, tolerance

WEIGHT = seeded(64, 8, 3, 3)  # 4608 numbers: 288 tiles of 16


def centred(weight: Tensor, tile: int) -> Tensor:
    matrix = Weight(weight.double()).tiles(tile)
    return matrix - matrix.mean(1, keepdim=True)


def factors_of(encoded: Encoded) -> tuple[Tensor, Tensor]:
    parts = encoded.parts
    return (
        from_codes(parts["codebook"], parts["codebook_scale"]).double(),
        from_codes(parts["latent"], parts["latent_scale"]).double(),
    )


def half_steps(scale: Tensor, count: int) -> float:
    """The largest Frobenius norm of rounding `count` numbers with each of these scales, none clipped."""
    half = scale.double() / 2 * (1 + tolerance(torch.float16))  # scales are rounded themselves
    return (count * half.square().sum()).sqrt().item()


@pytest.mark.parametrize("rank", [1, 4, 8, 13])
def test_fine_quantizers_approach_the_best_factors_of_this_rank(rank: int) -> None:
    """Between PCA's error, which no factors of this rank beat, and it plus all that rounding can add."""
    encoded = QSPCA(rank, 8, codebook_bits=8, tile=16, clip="minmax").encode(Weight(WEIGHT))
    codebook, latent = factors_of(encoded)
    matrix = centred(WEIGHT, 16)
    singular = torch.linalg.svdvals(matrix)
    best = singular[rank:].square().sum().sqrt().item()
    found = (decode(encoded).double() - WEIGHT.double()).norm().item()
    # C moves by half a step while Z is at most as large as the matrix; then Z moves, through C.
    moved = half_steps(encoded.parts["codebook_scale"], 16) * singular[0].item()
    moved += (
        half_steps(encoded.parts["latent_scale"], latent.shape[1]) * torch.linalg.svdvals(codebook)[0].item()
    )
    assert best * (1 - tolerance(torch.float32)) <= found <= best + moved
    assert moved < 0.1 * matrix.norm().item()  # else the bound would say nothing


def test_finer_quantizers_come_closer() -> None:
    errors = [
        relative_error(decode(QSPCA(8, bits, codebook_bits=bits, tile=16).encode(Weight(WEIGHT))), WEIGHT)
        for bits in range(2, 9)
    ]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_full_rank_leaves_only_the_rounding_of_the_latent(bits: int) -> None:
    """The codebook is square, so the latent absorbs every error of the codebook."""
    weight = seeded(128, 128)
    encoded = QSPCA(16, bits, tile=16, clip="minmax").encode(Weight(weight))
    assert encoded.kind == "factors"
    codebook, latent = factors_of(encoded)
    allowed = torch.linalg.svdvals(codebook)[0].item() * half_steps(
        encoded.parts["latent_scale"], latent.shape[1]
    )
    assert (decode(encoded).double() - weight.double()).norm().item() <= allowed
    exact = torch.linalg.solve(codebook, Weight(weight.double()).tiles(16) - encoded.parts["mean"].double())
    step = encoded.parts["latent_scale"].double()
    assert ((latent - exact).abs() <= step * (0.5 + tolerance(torch.float16) * 2 ** (bits - 1))).all()


@pytest.mark.parametrize("layer", ["layer1.0.conv1", "layer2.0.conv2", "layer3.0.downsample.0"])
class TestOnTrainedWeights:
    def weight(self, layer: str) -> Tensor:
        with safe_open(shared_weights("resnet18"), framework="pt") as file:
            weight: Tensor = file.get_tensor(f"{layer}.weight")
            return weight

    def test_more_rank_is_better(self, layer: str) -> None:
        weight = self.weight(layer)
        errors = [
            relative_error(decode(QSPCA(rank, 5).encode(Weight(weight))), weight)
            for rank in (16, 32, 64, 128)
        ]
        assert errors == sorted(errors, reverse=True)

    @pytest.mark.parametrize("codebook_bits", [3, 6])
    def test_more_latent_bits_are_better(self, layer: str, codebook_bits: int) -> None:
        weight = self.weight(layer)
        methods = [QSPCA(64, bits, codebook_bits=codebook_bits) for bits in (2, 3, 4, 6, 8)]
        errors = [relative_error(decode(method.encode(Weight(weight))), weight) for method in methods]
        assert errors == sorted(errors, reverse=True)

    def test_less_sparsity_is_better(self, layer: str) -> None:
        weight = self.weight(layer)
        methods = [QSPCA(64, 4, sparsity=share) for share in (0.6, 0.4, 0.2, 0.0)]
        errors = [relative_error(decode(method.encode(Weight(weight))), weight) for method in methods]
        assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("scales", ["row", "column"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.99])
def test_sparsity_is_counted_exactly(scales: Any, share: float) -> None:
    dense = QSPCA(8, 4, tile=16, latent_scales=scales).encode(Weight(WEIGHT))
    sparse = QSPCA(8, 4, tile=16, latent_scales=scales, sparsity=share).encode(Weight(WEIGHT))
    before, after = dense.parts["latent"], sparse.parts["latent"]
    asked = min(round(share * before.numel()), int(before.count_nonzero()))
    assert dense.extra_zeros == 0
    assert sparse.extra_zeros == asked
    assert int(after.count_nonzero()) == int(before.count_nonzero()) - asked
    assert torch.equal(after[after != 0], before[after != 0])
    for part in ("codebook", "codebook_scale", "latent_scale"):
        assert torch.equal(sparse.parts[part], dense.parts[part])


@pytest.mark.parametrize("scales", ["row", "column"])
def test_scales_lie_along_the_rows_or_columns_of_the_latent(scales: Any) -> None:
    encoded = QSPCA(8, 8, tile=16, latent_scales=scales, clip="minmax").encode(Weight(WEIGHT))
    codes, scale = encoded.parts["latent"].int(), encoded.parts["latent_scale"]
    along = 1 if scales == "row" else 0
    assert scale.shape == ((8, 1) if scales == "row" else (1, 288))
    reaches = torch.maximum(codes.amax(along), -codes.amin(along))
    assert (reaches >= 127).all()  # min-max: some code of each row, or column, is the last one


def test_columns_of_very_different_size_want_column_scales() -> None:
    weight = seeded(64, 128) * torch.logspace(-3, 0, 64)[:, None]
    errors = {
        scales: (
            decode(QSPCA(16, 4, tile=16, latent_scales=scales).encode(Weight(weight)))[:32] - weight[:32]
        ).norm()
        for scales in ("row", "column")
    }
    assert errors["column"] < errors["row"]


def test_the_mean_is_each_rows_mean_over_all_tiles() -> None:
    encoded = QSPCA(4, 4, tile=16).encode(Weight(WEIGHT))
    assert encoded.parts["mean"].dtype == torch.float32
    assert_close(encoded.parts["mean"], Weight(WEIGHT.double()).tiles(16).mean(1, keepdim=True))


def test_centring_takes_a_shared_tile_out_exactly() -> None:
    shared = seeded(16, 1).repeat(1, 288) * 100
    weight = (Weight(WEIGHT).tiles(16) + shared).T.reshape(WEIGHT.shape)
    centred_too = QSPCA(4, 4, tile=16).encode(Weight(weight))
    plain = QSPCA(4, 4, tile=16, center=False).encode(Weight(weight))
    assert "mean" not in plain.parts
    alone = QSPCA(4, 4, tile=16).encode(Weight(WEIGHT))
    assert (decode(centred_too) - weight).norm() < (decode(plain) - weight).norm()
    assert (
        relative_error(decode(centred_too) - weight, decode(alone) - WEIGHT) < tolerance(torch.float32) * 100
    )


def test_without_centring_zero_weights_decode_to_zero() -> None:
    encoded = QSPCA(4, 4, tile=16, center=False).encode(Weight(torch.zeros(64, 64)))
    assert decode(encoded).eq(0).all()


def test_tiles_that_do_not_divide_the_weight() -> None:
    weight = seeded(61, 67)
    errors = [
        relative_error(decode(QSPCA(rank, 6, tile=32).encode(Weight(weight))), weight) for rank in (8, 16, 32)
    ]
    assert errors == sorted(errors, reverse=True)


def test_weights_near_the_limit_of_fp32_have_a_mean() -> None:
    weight = torch.full((128, 128), 9e35)
    assert torch.equal(decode(QSPCA(4, 4, tile=16).encode(Weight(weight))), weight)


@pytest.mark.parametrize(
    ("method", "numel", "expected"),
    [
        (QSPCA(128, 3), 512 * 512 * 9, (256, 128)),
        (QSPCA(128, 3), 256 * 256, (256, 128)),  # as many tiles as a tile has numbers
        (QSPCA(128, 3), 256 * 255 + 1, (256, 128)),  # the last tile is filled up
        (QSPCA(128, 3), 256 * 255, (128, 128)),
        (QSPCA(128, 3), 64 * 64 * 9, (128, 128)),
        (QSPCA(128, 3), 128 * 64, (64, 64)),
        (QSPCA(8, 3), 128 * 64, (64, 8)),  # a rank below the tile stays
        (QSPCA(128, 3), 16 * 32, (16, 16)),  # 3584 bits of factors, 4096 of codes
        (QSPCA(128, 3), 16 * 20, (0, 0)),  # 3008 bits of factors, 2560 of codes
        (QSPCA(4, 3), 16 * 16, (16, 4)),  # 256 + 192 + 128 + 512 = 1088 bits, 2048 of codes
        (QSPCA(4, 3), 16 * 15, (0, 0)),  # no tile from 16 up
        (QSPCA(4, 3), 1, (0, 0)),
        (QSPCA(128, 3), 32 * 9, (0, 0)),  # MobileNetV2's first depthwise convolution
        (QSPCA(9, 3, tile=9), 64 * 64 * 9, (9, 9)),
        (QSPCA(4, 3, tile=9), 9 * 10, (9, 4)),  # 144 + 120 + 128 + 288 = 680 bits, 720 of codes
        (QSPCA(4, 3, tile=9), 9 * 9, (0, 0)),  # 668 bits, 648 of codes
        (QSPCA(4, 3, tile=9, center=False), 9 * 9, (9, 4)),  # 380 bits
        (QSPCA(4, 3, tile=9, latent_scales="column"), 9 * 10, (0, 0)),  # 10 + 4 scales: 776 bits
        (QSPCA(1, 2, tile=9), 9 * 8, (0, 0)),  # a tile below 16 is not halved
        (QSPCA(100, 3, tile=100), 100 * 60, (50, 50)),
        (QSPCA(256, 8, codebook_bits=8), 512 * 512 * 9, (0, 0)),  # more than eight bits a weight
        (QSPCA(256, 7), 512 * 512 * 9, (256, 256)),
    ],
)
def test_which_tile_and_rank_a_weight_gets(method: QSPCA, numel: int, expected: tuple[int, int]) -> None:
    assert method.fit(numel) == expected


@pytest.mark.parametrize("numel", [1, 7, 240, 241, 500, 4096, 65_280, 65_281, 100_000])
@pytest.mark.parametrize("method", [QSPCA(128, 3), QSPCA(5, 8), QSPCA(16, 2, tile=16), QSPCA(7, 3, tile=33)])
def test_factors_always_keep_the_papers_order_of_sizes(method: QSPCA, numel: int) -> None:
    """rank <= tile <= number of tiles, and smaller than eight bits a weight by the real parts' sizes."""
    encoded = method.encode(Weight(seeded(numel, 1)))
    tile, rank = method.fit(numel)
    if encoded.kind == "scalar":
        assert (tile, rank) == (0, 0)
        assert encoded.note.startswith("8-bit codes")
        return
    assert encoded.parts["codebook"].shape == (tile, rank)
    assert rank <= tile <= tile_count(numel, tile) == encoded.parts["latent"].shape[1]
    assert bool(encoded.note) == (tile != method.tile)
    bits = sum(
        part.numel() * encoded.bits.get(name, 8 * part.dtype.itemsize) for name, part in encoded.parts.items()
    )
    assert bits < 8 * numel


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"rank 0 outside 1\.\.256"),
        ({"rank": 257}, r"rank 257 outside 1\.\.256"),
        ({"rank": 17, "tile": 16}, r"rank 17 outside 1\.\.16"),
        ({"rank": True}, "rank is True, a bool; expected int"),
        ({"rank": 4.0}, "rank is 4.0, a float; expected int"),
        ({"rank": "4"}, "rank is '4', a str; expected int"),
        ({"latent_bits": 1}, "latent_bits is 1, allowed are 2 to 8"),
        ({"latent_bits": 9}, "latent_bits is 9, allowed are 2 to 8"),
        ({"latent_bits": None}, "latent_bits is None, a NoneType; expected int"),
        ({"codebook_bits": 1}, "codebook_bits is 1, allowed are 2 to 8"),
        ({"codebook_bits": 9}, "codebook_bits is 9, allowed are 2 to 8"),
        ({"tile": 1, "rank": 1}, "tile is 1, allowed are 2 to 4096"),
        ({"tile": 4097}, "tile is 4097, allowed are 2 to 4096"),
        ({"tile": False}, "tile is False, a bool; expected int"),
        ({"sparsity": -0.1}, "sparsity is -0.1, allowed are 0 up to but not 1"),
        ({"sparsity": 1.0}, "sparsity is 1.0, allowed are 0 up to but not 1"),
        ({"sparsity": float("nan")}, "sparsity is nan, allowed are 0 up to but not 1"),
        ({"sparsity": "half"}, "sparsity is 'half', a str; expected float or int"),
        ({"sparsity": True}, "sparsity is True, a bool; expected float or int"),
        ({"latent_scales": "rows"}, "latent_scales is 'rows', allowed are 'row' and 'column'"),
        ({"center": 1}, "center is 1, a int; expected bool"),
        ({"clip": "max"}, "clip is 'max', allowed are 'mse' and 'minmax'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_settings_say_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        QSPCA(**({"rank": 4, "latent_bits": 4} | settings))
    with pytest.raises(PlanError, match=message):
        replace(QSPCA(4, 4), **settings)
