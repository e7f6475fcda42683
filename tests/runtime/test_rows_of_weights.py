"""Weights whose codes lie in rows: rebuilt whole, in slices and row by row, they are the decoded weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.decoding import decode
from factorpack.kinds import KINDS
from factorpack.runtime.packed_weight import PackedWeight
from factorpack.weight import Weight

METHODS = [fp.Scalar(bits=bits) for bits in (2, 3, 4, 8)] + [
    fp.QSPCA(rank=32, tile=64, latent_bits=bits) for bits in (2, 3, 4, 8)
]


def packed_weight(
    method: fp.Method, rows: int = 600, columns: int = 1024
) -> tuple[PackedWeight, torch.Tensor]:
    torch.manual_seed(0)
    encoded = method.encode(Weight(torch.randn(rows, columns)))
    packed = PackedWeight(encoded, torch.empty(0))
    assert packed.in_rows
    return packed, decode(encoded)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_in_slices(method: fp.Method) -> None:
    packed, weight = packed_weight(method)
    assert len(KINDS[packed.kind].cut(packed.layout, packed.part_shapes)) > 1
    torch.testing.assert_close(packed(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_in_slices_that_begin_within_a_row(bits: int) -> None:
    packed, weight = packed_weight(fp.QSPCA(rank=32, tile=64, latent_bits=bits), columns=17 * 64)
    starts = [each.place.start for each in KINDS[packed.kind].cut(packed.layout, packed.part_shapes)]
    assert any(start % (17 * 64) for start in starts)
    torch.testing.assert_close(packed(), weight)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_row_by_row(method: fp.Method) -> None:
    packed, weight = packed_weight(method)
    index = torch.tensor([599, 0, 7, 7, 300])
    torch.testing.assert_close(packed.rows(index), weight[index])
    with pytest.raises((IndexError, RuntimeError)):
        packed.rows(torch.tensor([600]))


def test_an_embedding_tied_to_a_linear_layer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(600, 128), nn.Linear(128, 600, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            answers: torch.Tensor = self.head(self.embed(tokens))
            return answers

    torch.manual_seed(0)
    model, tokens = Tied().eval(), torch.randint(600, (2, 5))
    packed = fp.compress(model, fp.Scalar(bits=4), progress=False)
    expected = packed.load_into(Tied().eval())(tokens)
    applied = packed.apply(Tied().eval(), "packed")
    assert {layer.mode for layer in applied.layers} == {"packed"}
    torch.testing.assert_close(applied.model(tokens), expected)
