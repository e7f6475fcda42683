"""Weights are decoded where they go, with the bits that they have on a CPU."""

from __future__ import annotations

import pytest
import torch

from factorpack.decoding import decode
from factorpack.runtime import fill
from factorpack.runtime.fill import decode_on
from factorpack.weight import Weight
from tests.helpers import assert_same_tensor, seeded
from tests.runtime.layer_cases import METHODS

WITHOUT_SUMS = {"scalar", "levels"}


@pytest.mark.parametrize("method", METHODS)
def test_only_what_no_sum_is_part_of_is_decoded_elsewhere(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = METHODS[method].encode(Weight(seeded(24, 40)))
    asked: list[str] = []
    monkeypatch.setattr(fill, "decode", lambda each: asked.append(each.kind) or decode(each))
    found = decode_on(torch.device("meta"), encoded)
    assert (found.shape, found.dtype, found.is_contiguous()) == (encoded.shape, encoded.dtype, True)
    assert bool(asked) == (encoded.kind not in WITHOUT_SUMS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_decodes_the_bits_of_a_cpu(method: str) -> None:
    encoded = METHODS[method].encode(Weight(seeded(24, 40)))
    assert_same_tensor(decode_on(torch.device("cuda"), encoded).cpu(), decode(encoded).contiguous())
