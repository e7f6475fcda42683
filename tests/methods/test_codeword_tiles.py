"""What the methods of codewords share: tiles, codes in order of use, limits, and falling back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factorpack.decoding import check, decode, specs
from factorpack.errors import PlanError
from factorpack.format.streams import estimated_part_bytes
from factorpack.kinds.codewords import codeword_indices
from factorpack.methods import AQ, BGD, METHODS, PQF, VQ, Method, from_fields
from factorpack.methods.codeword_tiles import Tiles, cut, tile_of
from factorpack.quantize.uniform import storable_values
from factorpack.weight import Weight
from tests.helpers import assert_same_encoded, assert_same_tensor, relative_error, seeded

EACH: tuple[type[VQ | BGD | PQF | AQ], ...] = (VQ, BGD, PQF, AQ)


def quick(method: type[VQ | BGD | PQF | AQ], codewords: int = 16, **settings: int) -> Method:
    return method(codewords=codewords, iterations=3, **settings)


@pytest.mark.parametrize(
    ("shape", "groups", "small", "large"),
    [
        ((64, 32, 3, 3), 0, 9, 18),
        ((64, 3, 3, 3), 0, 9, 9),  # two kernels do not divide a filter
        ((64, 32, 1, 1), 0, 4, 8),
        ((64, 32), 0, 4, 8),
        ((64, 12), 0, 4, 4),
        ((64, 10), 0, 4, 4),
        ((24, 10, 5), 0, 5, 10),
        ((16, 24, 3, 3), 1, 9, 18),
        ((16, 6, 3, 3), 16, 9, 9),
        ((7,), 0, 4, 4),
    ],
)
def test_tiles_are_the_papers(shape: tuple[int, ...], groups: int, small: int, large: int) -> None:
    filter_size = Weight(torch.zeros(shape), groups).filter_size
    assert tile_of(shape, filter_size=filter_size) == small
    assert tile_of(shape, "large", filter_size) == large


@pytest.mark.parametrize("method", EACH)
def test_parts(method: type[VQ | BGD | PQF | AQ]) -> None:
    weight = 0.05 * seeded(32, 16, 3, 3)
    encoded = quick(method, 20).encode(Weight(weight))
    stages = 2 if method is AQ else 1
    assert (encoded.kind, encoded.bits) == ("codewords", {"indices": 5})
    assert encoded.parts["codebook"].shape == (20 * stages, 9)
    assert encoded.parts["codebook"].dtype == torch.float16
    assert encoded.parts["indices"].shape == (stages, 512)
    assert encoded.note == ("plain k-means: no calibration data" if method is BGD else "")


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 5), st.integers(1, 3))
def test_what_is_encoded_decodes_to_the_codewords_it_was_given(
    count: int, number: int, size: int, stages: int
) -> None:
    """Whatever order they are stored in."""
    generator = torch.Generator().manual_seed(count * number)
    points = torch.zeros(number, size)
    books = torch.randint(-100, 100, (stages, count, size), generator=generator).half()
    indices = torch.randint(count, (stages, number), generator=generator)
    tiles = Tiles(Weight(torch.zeros(number, size)), "", points, 1.0, count)
    encoded = tiles.encoded(books, indices)
    check(encoded.kind, encoded.layout, encoded.dtype, specs(encoded))
    expected = sum(book[index].float() for book, index in zip(books, indices, strict=True))
    assert_same_tensor(decode(encoded), expected + 0.0)


def test_codewords_used_more_often_have_smaller_codes() -> None:
    counts = torch.tensor([3, 50, 7, 1, 9])
    indices = torch.arange(5).repeat_interleave(counts)[None]
    points = torch.zeros(70, 2)
    tiles = Tiles(Weight(torch.zeros(70, 2)), "", points, 1.0, 5)
    encoded = tiles.encoded(torch.arange(10.0).reshape(1, 5, 2).half(), indices)
    codes = encoded.parts["indices"][0]
    assert [int((codes == code).sum()) for code in (0, -1, -2, -3, -4)] == [50, 9, 7, 3, 1]
    assert encoded.parts["codebook"][4].tolist() == [2.0, 3.0]  # code 0 of 3 bits is index 4


def test_the_order_of_use_makes_the_stream_shorter() -> None:
    encoded = VQ(64, iterations=5).encode(Weight(seeded(64, 64, 3, 3).pow(3)))
    codes, bits = encoded.parts["indices"], encoded.bits["indices"]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    mixed = (order[codeword_indices(encoded).long()] - 32).to(codes.dtype)
    assert estimated_part_bytes(codes, bits) < estimated_part_bytes(mixed, bits)


@pytest.mark.parametrize("method", EACH)
def test_there_are_at_most_a_quarter_as_many_codewords_as_tiles(method: type[VQ | BGD | PQF | AQ]) -> None:
    stages = 2 if method is AQ else 1
    encoded = quick(method, 256, tile=9).encode(Weight(seeded(16, 9, 3, 3)))
    assert encoded.parts["codebook"].shape == (36, 9)
    assert f"{36 // stages} codewords, not 256: there are only 144 tiles" in encoded.note


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize("shape", [(2, 2), (1, 1), (5,), (3, 1, 3, 3)])
def test_a_weight_too_small_for_codewords_gets_8_bits(
    method: type[VQ | BGD | PQF | AQ], shape: tuple[int, ...]
) -> None:
    encoded = quick(method).encode(Weight(seeded(*shape)))
    assert (encoded.kind, encoded.bits) == ("scalar", {"codes": 8})
    assert "codewords of" in encoded.note
    assert "would not be smaller" in encoded.note


@pytest.mark.parametrize("method", EACH)
def test_as_many_tiles_as_there_are_codewords_to_find_are_exact(method: type[VQ | BGD | PQF | AQ]) -> None:
    """Eight different tiles, each many times: every method finds them."""
    tiles = seeded(8, 4).half().float()
    which = torch.randint(8, (400,), generator=torch.Generator().manual_seed(0))
    weight = tiles[which].reshape(40, 40)
    error = relative_error(decode(quick(method, 8).encode(Weight(weight))), weight)
    assert error <= torch.finfo(torch.float16).eps * (10 if method is AQ else 0)


@pytest.mark.parametrize("method", EACH)
def test_a_seed_is_another_start(method: type[VQ | BGD | PQF | AQ]) -> None:
    weight = seeded(32, 32, 3, 3)
    one, again, other = (quick(method, seed=seed).encode(Weight(weight)) for seed in (0, 0, 1))
    assert_same_encoded(one, again)
    assert not torch.equal(one.parts["codebook"], other.parts["codebook"])


def test_the_global_generator_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    for method in EACH:
        quick(method).encode(Weight(seeded(32, 16)))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_random_weight_s_error_is_near_the_distortion_bound() -> None:
    """White Gaussian tiles of 4 at 8 bits: 2^-2R of the variance at R = 2 is no quantizer's to beat."""
    weight = seeded(256, 256)
    for method in (VQ(), PQF(iterations=20)):
        error = relative_error(decode(method.encode(Weight(weight))), weight)
        assert 2.0**-2 < error < 1.45 * 2.0**-2


SETTINGS: tuple[tuple[dict[str, object], str], ...] = (
    ({"codewords": 1}, "codewords is 1, allowed are 2 to 65536"),
    ({"codewords": 65537}, "codewords is 65537, allowed are 2 to 65536"),
    ({"codewords": "many"}, "codewords is 'many', a str; expected int"),
    ({"codewords": True}, "codewords is True, a bool; expected int"),
    ({"tile": 0}, "tile is 0, allowed are 1 to 4096"),
    ({"tile": 4097}, "tile is 4097, allowed are 1 to 4096"),
    ({"tile": 4.0}, "tile is 4.0, a float; expected int"),
    ({"iterations": 0}, "iterations is 0, expected at least 1"),
    ({"seed": 0.5}, "seed is 0.5, a float; expected int"),
)


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize(("settings", "message"), SETTINGS, ids=[message for _, message in SETTINGS])
def test_settings_that_cannot_be(
    method: type[VQ | BGD | PQF | AQ], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        from_fields(METHODS, {"method": method.name, **settings})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bgd", {"regime": "huge"}, "regime is 'huge', allowed are 'small' and 'large'"),
        ("pqf", {"regime": 3}, "regime is 3, allowed are 'small' and 'large'"),
        ("bgd", {"gram": "own"}, "gram is 'own', allowed are 'blocks' and 'shared'"),
        ("bgd", {"damping": 0}, "damping 0, samples 64: expected above 0"),
        ("bgd", {"samples": -1}, "samples -1: expected above 0, and from 0 up"),
        ("pqf", {"heat": -1.0}, "heat is -1.0, expected a number from 0 up"),
        ("pqf", {"decay": float("inf")}, "decay is inf, expected a number from 0 up"),
        ("aq", {"codebooks": 0}, "codebooks is 0, expected at least 1"),
        ("aq", {"codebooks": 17}, "codebooks is 17, .* 4096 codewords at most in all"),
    ],
)
def test_settings_of_one_method(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        from_fields(METHODS, {"method": name, **settings})


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.tensor([0.02, -0.03, 1e-7]), torch.float16),  # a small number among others may round
        (torch.tensor([1e-6, -1e-6]), torch.float32),
        (torch.tensor([7e4, 1.0]), torch.float32),
        (torch.tensor([-7e4, 1.0]), torch.float32),
        (torch.tensor([6e4, -6e4]), torch.float16),
        (torch.tensor([1e-30, -1e36]), torch.float32),
        (torch.zeros(3), torch.float16),
        (torch.zeros(0), torch.float16),
    ],
)
def test_values_are_stored_in_fp16_where_it_holds_them(values: torch.Tensor, dtype: torch.dtype) -> None:
    assert storable_values(values).dtype == dtype
    assert_same_tensor(storable_values(values), values.to(dtype))


def test_the_unit_is_a_power_of_two() -> None:
    for scale in (1e-20, 1.0, 3e7):
        tiles = cut(Weight(scale * seeded(32, 16)), 4, 8)
        assert isinstance(tiles, Tiles)
        assert torch.tensor(tiles.unit).log2().frac() == 0
        assert 0.5 <= tiles.points.abs().max() < 1
        assert torch.equal(tiles.in_unit(tiles.stored(torch.zeros(3, 4))), torch.zeros(3, 4))


def test_methods_are_plain_settings() -> None:
    for method in EACH:
        assert dataclasses.replace(quick(method), seed=3) == quick(method, seed=3)
