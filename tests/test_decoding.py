"""The representation's special cases, and types too narrow for the nearest code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from factorpack.decoding import check, decode, index_bits, specs
from factorpack.errors import FormatError
from factorpack.methods import QSPCA, Method, Scalar
from factorpack.quantize.uniform import code_dtype
from factorpack.record import DTYPES, Encoded
from factorpack.tiles import from_tiles, to_tiles
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_tensor, raw, seeded


def codes(*shape: int, low: int = -8, high: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)


def factors(
    codebook: Tensor,
    latent: Tensor,
    shape: tuple[int, ...],
    latent_scale: Tensor | None = None,
    **other: Tensor,
) -> Encoded:
    parts = {
        "codebook": codebook,
        "codebook_scale": torch.ones(1, codebook.shape[1], dtype=torch.float16),
        "latent": latent,
        "latent_scale": torch.ones(latent.shape[0], 1) if latent_scale is None else latent_scale,
    }
    return Encoded("factors", shape, torch.float32, parts | other, {"codebook": 4, "latent": 4})


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


def stored_codewords(codebook: Tensor, indices: list[list[int]], shape: tuple[int, ...]) -> Encoded:
    bits = index_bits(len(codebook) // len(indices))
    stored = (torch.tensor(indices) - 2 ** (bits - 1)).to(code_dtype(bits))
    parts = {"codebook": codebook, "indices": stored}
    return Encoded("codewords", shape, torch.float32, parts, {"indices": bits})


@pytest.mark.parametrize("count", [1, 2, 5, 8, 200, 300])
def test_codewords_by_the_formula(count: int) -> None:
    """Whole numbers, so that sums are exact; the last of nine tiles of three is cut short by two."""
    codebook = torch.arange(2 * count * 3).reshape(2 * count, 3).float()
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(count, (2, 9), generator=generator).tolist()
    encoded = stored_codewords(codebook, indices, (5, 5))
    check("codewords", (5, 5), torch.float32, 0, specs(encoded))
    tiles = [
        (codebook[first] + codebook[count + second]).tolist() for first, second in zip(*indices, strict=True)
    ]
    flat = [number for tile in tiles for number in tile][:25]
    assert_same_tensor(decode(encoded), torch.tensor(flat).reshape(5, 5))


def test_one_stage_of_codewords_is_a_one_hot_latent() -> None:
    codebook, choice = codes(6, 4), torch.arange(10) % 4
    latent = torch.nn.functional.one_hot(choice, 4).T.to(torch.int8)
    plain = stored_codewords(codebook.T.half().contiguous(), [choice.tolist()], (10, 6))
    assert_same_tensor(decode(plain), decode(factors(codebook, latent, (10, 6))))


@pytest.mark.parametrize(("count", "index"), [(1, 1), (2, 2), (5, 5), (5, 7), (300, 511)])
def test_an_index_beyond_the_codewords_is_refused(count: int, index: int) -> None:
    encoded = stored_codewords(torch.ones(count, 2), [[0, index, 0]], (6,))
    message = f"part 'indices' holds 0 to {index}, a codebook has codewords 0 to {count - 1}"
    with pytest.raises(FormatError, match=message):
        decode(encoded)


def test_tiles_of_in_times_w_are_spatial_svd() -> None:
    """Read as (out*h) x (in*w), a weight of separable filters has the rank of its separable parts."""
    outputs, inputs, height, width, rank = 6, 5, 3, 3, 2
    vertical = seeded(rank, outputs, height, dtype=torch.float64)
    horizontal = seeded(rank, inputs, width, dtype=torch.float64, seed=1)
    weight = torch.einsum("roh,riw->oihw", vertical, horizontal)
    by_position = weight.permute(0, 2, 1, 3)  # out, h, in, w: a tile is one row of a filter over all inputs
    assert int(torch.linalg.matrix_rank(to_tiles(by_position, inputs * width))) == rank


@pytest.mark.parametrize("centred", [True, False])
def test_factors_by_the_formula(centred: bool) -> None:
    codebook, latent = codes(8, 3), codes(3, 5)
    scales = {"codebook_scale": seeded(1, 3).abs().half(), "latent_scale": seeded(3, 1, seed=1).abs()}
    mean = {"mean": seeded(8, 1, seed=2)} if centred else {}
    encoded = factors(codebook, latent, (4, 9), **scales, **mean)
    c = codebook.double() * scales["codebook_scale"].double()
    z = latent.double() * scales["latent_scale"].double()
    matrix = c @ z + (mean["mean"].double() if centred else 0.0)
    assert_close(decode(encoded), from_tiles(matrix, (4, 9)), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("method", [Scalar(2, "minmax"), Scalar(4), QSPCA(8, 4, tile=16)])
def test_codes_beyond_a_narrow_type_stop_at_its_largest(dtype: torch.dtype, method: Method) -> None:
    limit = min(torch.finfo(dtype).max, 9e35)
    weight = (seeded(64, 64).clamp(-1, 1) * limit).to(dtype)
    assert decode(method.encode(Weight(weight))).float().isfinite().all()


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


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_a_constant_of_every_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.tensor([1]).to(dtype)
    encoded = Encoded("constant", shape, dtype, {"value": value})
    check("constant", shape, dtype, 0, specs(encoded))
    found = decode(encoded)
    assert (found.shape, found.dtype, found.is_contiguous()) == (shape, dtype, True)
    assert raw(found) == raw(value) * found.numel()


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.int16), (9, torch.int8), (9, torch.int32)])
def test_codes_of_another_type_are_refused(bits: int, dtype: torch.dtype) -> None:
    parts = {"codes": torch.zeros(3, 5, dtype=dtype), "scale": torch.ones(1, 1)}
    encoded = Encoded("scalar", (3, 5), torch.float32, parts, {"codes": bits})
    with pytest.raises(FormatError, match=f"part 'codes' is {dtype}, codes of {bits} bits are"):
        check("scalar", (3, 5), torch.float32, 0, specs(encoded))


def level_codes(*rows: list[int], levels: list[list[float]], bits: int, shape: tuple[int, ...]) -> Encoded:
    parts = {"codes": torch.tensor(rows, dtype=torch.int8), "levels": torch.tensor(levels).half()}
    return Encoded("levels", shape, torch.float32, parts, {"codes": bits})


def test_levels_by_hand() -> None:
    """Code 0 is the middle level, or of an even number the first above the middle."""
    three = level_codes([-1, 0, 1], [1, 1, 0], levels=[[-5.0, 0.5, 2.0]], bits=2, shape=(2, 3))
    assert decode(three).tolist() == [[-5.0, 0.5, 2.0], [2.0, 2.0, 0.5]]
    each = level_codes([-1, 0], [0, -1], levels=[[1.0, 2.0], [3.0, 4.0]], bits=1, shape=(2, 1, 2))
    assert decode(each).tolist() == [[[1.0, 2.0]], [[4.0, 3.0]]]
    four = level_codes([-2, -1, 0, 1], levels=[[1.0, 2.0, 3.0, 4.0]], bits=2, shape=(1, 4))
    assert decode(four).tolist() == [[1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize("step", [0.25, 3.0])
def test_evenly_spaced_levels_are_scalar_codes(step: float) -> None:
    wide = codes(5, 7)
    levels = step * torch.arange(-8, 8)[None].float()
    parts = {"codes": wide, "levels": levels}
    scalar_parts = {"codes": wide, "scale": torch.full((1, 1), step)}
    assert_same_tensor(
        decode(Encoded("levels", (5, 7), torch.float32, parts, {"codes": 4})) + 0.0,
        decode(Encoded("scalar", (5, 7), torch.float32, scalar_parts, {"codes": 4})) + 0.0,
    )


@pytest.mark.parametrize(
    ("code", "found"), [(-2, "-2 to 1"), (-4, "-4 to 1"), (2, "-1 to 2"), (3, "-1 to 3")]
)
def test_a_code_without_a_level_is_refused(code: int, found: str) -> None:
    encoded = level_codes([-1, 0, 1], [code, 0, 0], levels=[[1.0, 2.0, 3.0]], bits=3, shape=(2, 3))
    check("levels", (2, 3), torch.float32, 0, specs(encoded))
    with pytest.raises(FormatError, match=f"codes {found}, 3 levels allow -1 to 1"):
        decode(encoded)


def test_spatial_factors_by_the_formula() -> None:
    """W[o, i, y, x] = sum_k v[k, i, y] u[o, k, x]."""
    vertical, horizontal = codes(15, 2), codes(2, 28, seed=1)
    encoded = replace(factors(vertical, horizontal, (7, 5, 3, 4)), kind="spatial")
    v, u = vertical.double().reshape(5, 3, 2), horizontal.double().reshape(2, 7, 4)
    assert torch.equal(decode(encoded).double(), torch.einsum("iyk,kox->oiyx", v, u))
