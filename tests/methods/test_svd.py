"""Low rank: what is lost is what the singular values left out say, and filters come apart as they should."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from benchmarks.studies.overhead import count_overhead
from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.format.streams import split_of
from factorpack.methods import METHODS, SVD, Keep, Method, SpatialSVD
from factorpack.packed import Packed
from factorpack.size import fixed_bits, words
from factorpack.tune.trainable import TrainableFactors
from factorpack.tune.trim import without_dead_rows
from factorpack.weight import Weight
from tests.helpers import assert_close, relative_error, seeded

WEIGHT = seeded(24, 10, 3, 3, dtype=torch.float64)
each_class = pytest.mark.parametrize("cls", [SVD, SpatialSVD])


def matrix_of(cls: type[SVD] | type[SpatialSVD], weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(1).T if cls is SVD else Weight(weight).spatial()


@each_class
@pytest.mark.parametrize("rank", [1, 4, 15])
def test_what_is_lost_is_the_discarded_energy(cls: type[SVD] | type[SpatialSVD], rank: int) -> None:
    """Eckart-Young. At 16 bits rounding adds a 2^-15th of the largest number to each, and no more."""
    encoded = cls(rank=rank, bits=16).encode(Weight(WEIGHT))
    lost = relative_error(decode(encoded), WEIGHT)
    values = torch.linalg.svdvals(matrix_of(cls, WEIGHT))
    expected = (values[rank:].norm() / values.norm()).item()
    assert expected <= lost <= expected + 1e-3
    assert encoded.parts["codebook"].dtype == torch.int16
    assert len(encoded.parts["latent"]) == rank
    assert encoded.note == ""


def test_separable_filters_have_the_rank_of_their_parts() -> None:
    vertical, horizontal = seeded(2, 10, 5), seeded(24, 2, 3, seed=1)
    weight = torch.einsum("kiy,okx->oiyx", vertical, horizontal)
    assert relative_error(decode(SpatialSVD(rank=2, bits=16).encode(Weight(weight))), weight) < 1e-3
    assert relative_error(decode(SVD(rank=2, bits=16).encode(Weight(weight))), weight) > 0.1


@each_class
def test_more_rank_is_never_worse(cls: type[SVD] | type[SpatialSVD]) -> None:
    errors = [
        relative_error(decode(cls(rank=rank, bits=16).encode(Weight(WEIGHT))), WEIGHT)
        for rank in range(1, 16, 2)
    ]
    assert all(fine < coarse for coarse, fine in pairwise(errors))


@pytest.mark.parametrize(
    ("method", "rank"),
    [
        (SVD(share=0.5), 9),  # 9 (24 + 90) = 1026 of 2160
        (SVD(share=0.05), 1),
        (SVD(share=0.01), 1),  # less than one component, and never less
        (SpatialSVD(share=0.5), 10),  # 10 (30 + 72) = 1020
    ],
)
def test_a_share_of_the_numbers(method: Method, rank: int) -> None:
    encoded = method.encode(Weight(WEIGHT))
    assert len(encoded.parts["latent"]) == rank
    assert encoded.parts["codebook"].numel() + encoded.parts["latent"].numel() <= max(1080, 114)


def test_both_factors_are_about_as_large() -> None:
    encoded = SVD(rank=4).encode(Weight(100 * WEIGHT))
    sizes = [encoded.parts[name].float().norm() for name in ("codebook_scale", "latent_scale")]
    assert 0.25 < sizes[0] / sizes[1] < 4.0


def test_bits_and_words_by_hand() -> None:
    encoded = SVD(rank=5, bits=6).encode(Weight(WEIGHT))
    found = {name: bits for name, bits in fixed_bits(encoded).items() if bits}
    assert found == {"codebook": 90 * 5 * 6, "latent": 5 * 24 * 6, "scales": 2 * 5 * 16}
    assert words(encoded).startswith("rank 5 of 90, 6 bits, ")
    assert words(SpatialSVD(rank=5, bits=6).encode(Weight(WEIGHT))).startswith("rank 5 of 30, 6 bits, ")


@each_class
@pytest.mark.parametrize("rank", [20, 40, 100])
def test_factors_that_hold_no_fewer_numbers_give_way_to_codes(
    cls: type[SVD] | type[SpatialSVD], rank: int
) -> None:
    encoded = cls(rank=rank).encode(Weight(seeded(40, 40)))
    assert (encoded.kind, encoded.bits) == ("scalar", {"codes": 8})
    assert encoded.note == f"codes: factors of rank {rank} would hold no fewer numbers"
    assert cls(rank=rank, bits=4).encode(Weight(seeded(40, 40))).bits == {"codes": 4}
    assert cls(rank=rank, bits=16).encode(Weight(seeded(40, 40))).bits == {"codes": 8}
    assert cls(rank=19).encode(Weight(seeded(40, 40))).kind != "scalar"


@each_class
def test_wide_codes_train_as_fast_as_narrow_ones(cls: type[SVD] | type[SpatialSVD]) -> None:
    """A step of Adam moves weights of 16-bit factors about as far as those of 8-bit factors."""
    moves = []
    for bits in (8, 16):
        trainable = TrainableFactors(cls(rank=4, bits=bits).encode(Weight(WEIGHT.float())))
        before = trainable().detach()
        optimizer = torch.optim.Adam(trainable.parameters(), lr=3e-3)
        for _ in range(20):
            optimizer.zero_grad()
            trainable().backward(seeded(24, 10, 3, 3, seed=1))
            optimizer.step()
        moves.append((trainable().detach() - before).norm().item())
    assert 0.5 < moves[1] / moves[0] < 2.0


@each_class
def test_the_rest_of_the_library_knows_both_kinds(cls: type[SVD] | type[SpatialSVD]) -> None:
    """Channels of the latent are found, dead components go, and what rebuilding costs is counted."""
    module = torch.nn.Conv2d(10, 24, 3)
    encoded = cls(rank=4).encode(Weight(module.weight))
    assert split_of(encoded, "latent") == 24
    parts = dict(encoded.parts)
    parts["latent"] = parts["latent"] * torch.tensor([[1], [0], [1], [1]], dtype=torch.int8)
    dead = replace(encoded, parts=parts)
    alive = without_dead_rows(dead)
    assert len(alive.parts["latent"]) == 3
    assert_close(decode(alive), decode(dead))
    net = torch.nn.Sequential(module)
    packed = Packed({"0.weight": encoded, "0.bias": Keep().encode(Weight(module.bias))})
    assert count_overhead(packed, net, torch.zeros(1, 10, 3, 3)).total.overhead == 4


@pytest.mark.parametrize("name", ["svd", "spatial_svd"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "rank is None and share None: give exactly one of them"),
        ({"rank": 3, "share": 0.5}, "rank is 3 and share 0.5: give exactly one of them"),
        ({"rank": 0}, "rank is 0, allowed are 1 and more"),
        ({"rank": 2.0}, "rank is 2.0, a float; expected int"),
        ({"share": 0.0}, "share is 0.0, allowed are numbers above 0 up to 1"),
        ({"share": 1.5}, "share is 1.5, allowed are numbers above 0 up to 1"),
        ({"share": 0.5, "bits": 17}, "bits is 17, allowed are 2 to 16"),
        ({"share": 0.5, "bits": 1}, "bits is 1, allowed are 2 to 16"),
    ],
)
def test_impossible_settings(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        METHODS[name](**settings)


def test_a_vector_has_no_filters() -> None:
    with pytest.raises(PlanError, match="two dimensions or more"):
        SpatialSVD(rank=1).encode(Weight(seeded(5)))
