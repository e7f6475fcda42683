"""Codewords, alone and summed over stages."""

from __future__ import annotations

import pytest
import torch

from factorpack.decoding import check, decode, specs
from factorpack.errors import FormatError
from tests.helpers import assert_same_tensor
from tests.kinds.coded import codes, factors, stored_codewords


@pytest.mark.parametrize("count", [1, 2, 5, 8, 200, 300])
def test_codewords_by_the_formula(count: int) -> None:
    """Whole numbers, so that sums are exact; the last of nine tiles of three is cut short by two."""
    codebook = torch.arange(2 * count * 3).reshape(2 * count, 3).float()
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(count, (2, 9), generator=generator).tolist()
    encoded = stored_codewords(codebook, indices, (5, 5))
    check("codewords", encoded.layout, torch.float32, specs(encoded))
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
