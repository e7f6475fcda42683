"""Factors: the formula, and the methods that are special cases of it."""

from __future__ import annotations

import pytest
import torch

from factorpack.decoding import decode
from factorpack.record import Encoded
from factorpack.tiles import Layout
from tests.helpers import assert_close, assert_same_tensor, seeded
from tests.kinds.coded import codes, factors


@pytest.mark.parametrize("centred", [True, False])
def test_factors_by_the_formula(centred: bool) -> None:
    codebook, latent = codes(8, 3), codes(3, 5)
    scales = {"codebook_scale": seeded(1, 3).abs().half(), "latent_scale": seeded(3, 1, seed=1).abs()}
    mean = {"mean": seeded(8, 1, seed=2)} if centred else {}
    encoded = factors(codebook, latent, (4, 9), **scales, **mean)
    c = codebook.double() * scales["codebook_scale"].double()
    z = latent.double() * scales["latent_scale"].double()
    matrix = c @ z + (mean["mean"].double() if centred else 0.0)
    assert_close(decode(encoded), Layout((4, 9)).from_tiles(matrix), torch.float32)


def test_an_identity_codebook_is_scalar_quantization() -> None:
    """With the tile a whole filter and a scale a column, column j is output channel j."""
    latent, scale = codes(12, 20), seeded(1, 20).abs()
    encoded = factors(torch.eye(12, dtype=torch.int8), latent, (20, 12), scale)
    scalar_parts = {"codes": latent.T.contiguous(), "scale": scale.T.contiguous()}
    expected = Encoded("scalar", (20, 12), torch.float32, scalar_parts, {"codes": 4})
    assert_same_tensor(decode(encoded), decode(expected))


def test_a_one_hot_latent_is_vector_quantization() -> None:
    codebook, choice = codes(6, 4), torch.arange(10) % 4
    latent = torch.nn.functional.one_hot(choice, 4).T.to(torch.int8)
    assert_same_tensor(decode(factors(codebook, latent, (10, 6))), codebook.T[choice].float())


def test_a_binary_latent_is_additive_quantization() -> None:
    codebook, latent = codes(6, 4), codes(4, 10, low=0, high=1)
    chosen = [codebook.T[latent[:, j] == 1].float().sum(0) for j in range(10)]
    assert_same_tensor(decode(factors(codebook, latent, (10, 6))), torch.stack(chosen))


def test_tiles_of_in_times_w_are_spatial_svd() -> None:
    """Read as (out*h) x (in*w), a weight of separable filters has the rank of its separable parts."""
    outputs, inputs, height, width, rank = 6, 5, 3, 3, 2
    vertical = seeded(rank, outputs, height, dtype=torch.float64)
    horizontal = seeded(rank, inputs, width, dtype=torch.float64, seed=1)
    weight = torch.einsum("roh,riw->oihw", vertical, horizontal)
    by_position = weight.permute(0, 2, 1, 3)  # out, h, in, w: a tile is one row of a filter over all inputs
    assert (
        int(torch.linalg.matrix_rank(Layout(tuple(by_position.shape)).to_tiles(by_position, inputs * width)))
        == rank
    )


def test_one_step_is_the_same_scale_everywhere() -> None:
    wide = codes(3, 5).to(torch.int16) * 4000
    one, each = torch.full((1, 1), 0.25), torch.full((3, 1), 0.25)
    assert_same_tensor(
        decode(factors(codes(8, 3), wide, (4, 10), one)), decode(factors(codes(8, 3), wide, (4, 10), each))
    )
    scalars = [
        Encoded("scalar", (3, 5), torch.float32, {"codes": wide, "scale": scale}, {"codes": 16})
        for scale in (one, each)
    ]
    assert_same_tensor(decode(scalars[0]), wide.float() / 4)
    assert_same_tensor(decode(scalars[1]), wide.float() / 4)


@pytest.mark.parametrize("scale", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [6, 7])
def test_narrow_tiles_are_the_product_of_their_factors(scale: torch.dtype, count: int) -> None:
    """Two at a time where they are even and their scales FP16, one by one elsewhere; with a mean and without."""
    generator = torch.Generator().manual_seed(count)
    codebook = torch.randint(-50, 50, (9, 5), generator=generator, dtype=torch.int8)
    latent = torch.randint(-50, 50, (5, count), generator=generator, dtype=torch.int8)
    one = torch.full((1, 1), 0.25, dtype=scale)
    parts = {"codebook": codebook, "codebook_scale": one, "latent": latent, "latent_scale": one}
    expected = (codebook.double() @ latent.double() / 16).T.reshape(count, 9)
    plain = Encoded("factors", (count, 9), torch.float32, parts, {"codebook": 8, "latent": 8})
    assert_same_tensor(decode(plain), expected.float())  # sums of quarters are exact
    mean = torch.arange(9.0)[:, None]
    centred = Encoded("factors", (count, 9), torch.float32, {**parts, "mean": mean}, plain.bits)
    assert_same_tensor(decode(centred), (expected + mean.T).float())


def test_weights_do_not_depend_on_the_order_in_memory() -> None:
    """Where a stream is split, its codes are read into a transposed matrix."""
    parts = {
        "codebook": torch.randint(-99, 99, (9, 9), generator=torch.Generator().manual_seed(0)).to(torch.int8),
        "codebook_scale": torch.full((1, 1), 6e-8),
        "latent": torch.randint(-99, 99, (9, 384), generator=torch.Generator().manual_seed(1)).to(torch.int8),
        "latent_scale": torch.full((1, 1), 0.002),
    }
    found = [
        decode(Encoded("factors", (24, 16, 3, 3), torch.float32, parts | own, {"codebook": 8, "latent": 8}))
        for own in ({}, *({name: parts[name].T.contiguous().T} for name in ("codebook", "latent")))
    ]
    assert_same_tensor(found[1], found[0])
    assert_same_tensor(found[2], found[0])
