"""What rebuilding on the fly costs: the paper's numbers, and small layers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.studies.overhead import OverheadReport, count_overhead
from benchmarks.zoo import resnet18


@pytest.fixture(scope="module")
def on_resnet18() -> tuple[fp.Packed, OverheadReport]:
    model = resnet18()
    packed = fp.compress(model, fp.QSPCA(128, 3, clip="minmax"))
    return packed, count_overhead(packed, model, torch.zeros(1, 3, 224, 224))


class TestThePaper:
    def test_a_layers_overhead_is_rank_over_positions(
        self, on_resnet18: tuple[fp.Packed, OverheadReport]
    ) -> None:
        """56 x 56 positions in the first stage, and a quarter of them in each one after."""
        packed, report = on_resnet18
        assert report.uncounted == ()
        assert set(report.layers) == {name for name, encoded in packed.items() if encoded.kind == "factors"}
        unchanged = 0
        for name, cost in report.layers.items():
            side = 56 >> (int(name[len("layer")]) - 1)
            rank = packed[name].parts["codebook"].shape[1]
            assert cost.overhead == rank / side**2
            unchanged += rank == 128
        assert unchanged == 18  # all but one of the 19: the smallest shortcut has fewer tiles

    def test_from_4_to_261_percent_and_85_in_all(self, on_resnet18: tuple[fp.Packed, OverheadReport]) -> None:
        _, report = on_resnet18
        by_layer = [cost.overhead for cost in report.layers.values()]
        assert round(100 * min(by_layer)) == 4
        assert round(100 * max(by_layer)) == 261
        assert math.isclose(report.total.overhead, 0.85, abs_tol=0.01)

    def test_in_bit_operations_it_is_far_less(self, on_resnet18: tuple[fp.Packed, OverheadReport]) -> None:
        """4-bit codebook times 3-bit latent, beside 32 by 32."""
        _, report = on_resnet18
        assert math.isclose(report.total.bit_overhead, report.total.overhead * 12 / 1024)


def factored(model: nn.Module) -> fp.Packed:
    method = fp.QSPCA(2, 5, tile=16, clip="minmax")
    names = [name for name, tensor in model.state_dict().items() if tensor.dim() > 1]
    return fp.compress(model, method, layers=dict.fromkeys(names, method))


@pytest.mark.parametrize(
    ("layer", "example", "positions"),
    [
        (nn.Linear(32, 48), torch.zeros(1, 32), 1),
        (nn.Linear(32, 48), torch.zeros(2, 7, 32), 14),
        (nn.Conv1d(16, 32, 3), torch.zeros(1, 16, 10), 8),
        (nn.Conv2d(16, 32, 3, stride=2, padding=1), torch.zeros(1, 16, 8, 8), 16),
        (nn.Conv2d(16, 32, 3, stride=2, padding=1), torch.zeros(5, 16, 8, 8), 80),
        (nn.Conv2d(32, 32, 3, groups=2), torch.zeros(1, 32, 5, 5), 9),
        (nn.Conv3d(8, 16, 2), torch.zeros(1, 8, 3, 3, 3), 8),
        (nn.ConvTranspose2d(16, 32, 4, stride=2), torch.zeros(1, 16, 5, 5), 25),
        (nn.ConvTranspose1d(32, 32, 3, groups=2), torch.zeros(1, 32, 6), 6),
    ],
    ids=repr,
)
def test_layers_by_hand(layer: nn.Module, example: Tensor, positions: int) -> None:
    packed = factored(layer)
    cost = count_overhead(packed, layer, example, weight_bits=8, activation_bits=4).layers["weight"]
    numel = packed["weight"].numel
    assert cost.layer_macs == numel * positions
    assert cost.rebuild_macs == numel * 2
    assert cost.layer_bit_ops == numel * positions * 8 * 4
    assert cost.rebuild_bit_ops == numel * 2 * 4 * 5
    assert cost.overhead == 2 / positions


def test_transposed_convolutions_by_counting_products() -> None:
    """An input of ones times a weight of ones sums to the number of products."""
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False).double()
    nn.init.ones_(layer.weight)
    example = torch.ones(1, 4, 5, 5, dtype=torch.float64)
    assert layer(example).sum().item() == layer.weight.numel() * 25


def test_the_filled_up_tile_is_rebuilt_too() -> None:
    layer = nn.Linear(31, 31)  # 961 numbers: 61 tiles of 16
    cost = count_overhead(factored(layer), layer, torch.zeros(1, 31)).layers["weight"]
    assert (cost.layer_macs, cost.rebuild_macs) == (961, 61 * 16 * 2)


class Shared(nn.Module):
    """A layer that runs twice under two names, an embedding tied to a head, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.a = self.b = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Linear(32, 32)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.b(self.a(self.embed(words))))
        return logits


def test_shared_layers_tied_weights_and_layers_that_never_run() -> None:
    model = Shared()
    report = count_overhead(factored(model), model, torch.zeros(1, 3, dtype=torch.int64))
    assert set(report.layers) == {"embed.weight", "a.weight"}
    assert report.layers["a.weight"].layer_macs == 2 * 3 * 32 * 32
    assert report.layers["a.weight"].rebuild_macs == 2 * 2 * 32 * 32
    assert report.layers["embed.weight"].layer_macs == 3 * 64 * 32
    assert report.uncounted == ("idle.weight",)
    assert report.total.layer_macs == sum(cost.layer_macs for cost in report.layers.values())


def test_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count_overhead(factored(model), model, torch.zeros(1, 32))
    assert model.training
    assert not model[0]._forward_hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_only_factors_are_counted() -> None:
    model = nn.Linear(32, 32)
    report = count_overhead(fp.compress(model, fp.Scalar(4)), model, torch.zeros(1, 32))
    assert (report.layers, report.uncounted) == ({}, ())
    assert (report.total.overhead, report.total.bit_overhead) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("layer", "example"),
    [
        (nn.Linear(32, 24), torch.zeros(5, 32)),
        (nn.Conv2d(16, 24, 1), torch.zeros(2, 16, 5, 5)),
        (nn.Conv2d(32, 24, 1, groups=2, stride=2), torch.zeros(2, 32, 5, 5)),
    ],
)
def test_factored_layers_cost_what_their_two_products_do(layer: nn.Module, example: Tensor) -> None:
    """Counted from what the layer multiplies: a number of the mixed inputs is 16 products, one of the outputs
    as many as Z has numbers a filter."""
    model = nn.Sequential(layer)
    packed = factored(model)
    cost = count_overhead(packed, model, example).layers["0.weight"]
    rank, tiles = packed["0.weight"].parts["latent"].shape
    outputs = model(example)
    positions = outputs.numel() // 24
    groups = getattr(layer, "groups", 1)
    blocks = groups * tiles // 24
    mixing, summing = positions * blocks * rank * 16, positions * tiles * rank
    assert cost.factored_macs == mixing + summing
    bits = packed["0.weight"].bits
    assert cost.factored_bit_ops == 32 * (mixing * bits["codebook"] + summing * bits["latent"])
    share = rank / 16 + groups * rank / 24  # k/d + k/out of the layer's own
    assert math.isclose(cost.factored_macs / cost.layer_macs, share)


def test_where_a_tile_crosses_filters_there_is_no_factored_cost(
    on_resnet18: tuple[fp.Packed, OverheadReport],
) -> None:
    _, report = on_resnet18
    found = {name for name, cost in report.layers.items() if cost.factored_macs is not None}
    assert found == {
        f"layer{stage}.0.downsample.0.weight" for stage in (2, 3, 4)
    }  # 3 x 3 does not divide 256
    assert report.total.factored_macs is None
