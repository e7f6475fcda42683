"""Two layers in the place of one: the same answers as the decoded weight's, for every way to move a filter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from factorpack.decode import decode
from factorpack.errors import PlanError
from factorpack.layers import as_two_layers
from factorpack.methods import QSPCA, SVD, Method, Scalar, SpatialSVD
from tests.helpers import assert_close, seeded

METHODS = {"svd": SVD(rank=3), "spatial": SpatialSVD(rank=3), "fine": SpatialSVD(rank=2, bits=16)}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)

MOVES: dict[str, dict[str, Any]] = {
    "square": {"kernel_size": 3},
    "upright": {"kernel_size": (5, 2)},
    "lying": {"kernel_size": (1, 4)},
    "a point": {"kernel_size": 1},
    "strides": {"kernel_size": 3, "stride": (2, 3)},
    "padding": {"kernel_size": (3, 5), "padding": (1, 2)},
    "dilation": {"kernel_size": 3, "dilation": (2, 3), "padding": (2, 1)},
    "everything": {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)},
    "same": {"kernel_size": (4, 3), "padding": "same", "dilation": (1, 2)},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "reflect": {"kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect"},
    "circular": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular"},
    "no bias": {"kernel_size": 3, "bias": False},
}


def convolution(**settings: Any) -> nn.Conv2d:
    module = nn.Conv2d(6, 10, **settings)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(seeded(*parameter.shape, seed=index))
    return module


@each_method
@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_convolutions(method: Method, moves: dict[str, Any]) -> None:
    module = convolution(**moves)
    encoded = method.encode(module.weight)
    assert encoded.kind in ("factors", "spatial")
    layers = as_two_layers(module, encoded)
    inputs = seeded(2, 6, 13, 11, seed=9)
    answers = layers(inputs)
    with torch.no_grad():
        module.weight.copy_(decode(encoded))
    assert_close(answers.detach(), module(inputs).detach())
    assert layers[0].bias is None
    assert (layers[1].bias is None) == (module.bias is None)


def test_the_filters_are_thin() -> None:
    module = convolution(kernel_size=(5, 3))
    whole = as_two_layers(module, SVD(rank=2).encode(module.weight))
    assert [tuple(each.weight.shape) for each in whole] == [(2, 6, 5, 3), (10, 2, 1, 1)]
    spatial = as_two_layers(module, SpatialSVD(rank=2).encode(module.weight))
    assert [tuple(each.weight.shape) for each in spatial] == [(2, 6, 5, 1), (10, 2, 1, 3)]


@each_method
@pytest.mark.parametrize("bias", [True, False])
def test_linear(method: Method, bias: bool) -> None:
    module = nn.Linear(40, 20, bias=bias, dtype=torch.float64).eval()
    encoded = method.encode(module.weight)
    layers = as_two_layers(module, encoded)
    inputs = seeded(4, 7, 40, dtype=torch.float64)
    answers = layers(inputs)
    with torch.no_grad():
        module.weight.copy_(decode(encoded))
    assert_close(answers.detach(), module(inputs).detach(), torch.float32)
    assert [each.weight.dtype for each in layers] == [torch.float64] * 2
    assert not layers.training


def test_no_random_number_is_drawn() -> None:
    module = convolution(kernel_size=3)
    encoded = SVD(rank=3).encode(module.weight)
    before = torch.get_rng_state()
    as_two_layers(module, encoded)
    assert torch.equal(torch.get_rng_state(), before)


GROUPED = nn.Conv2d(8, 8, 3, groups=2)


@pytest.mark.parametrize(
    ("module", "method", "message"),
    [
        (GROUPED, SVD(rank=2), "a convolution of 2 groups cannot become two layers, one of 1 can"),
        (nn.Conv1d(8, 8, 3), SVD(rank=2), "a Conv1d cannot become two layers"),
        (nn.ConvTranspose2d(8, 8, 3), SVD(rank=2), "a ConvTranspose2d cannot become two layers"),
        (nn.Linear(64, 64), Scalar(4), "a weight stored as 'scalar' in other pieces than whole filters"),
        (nn.Linear(64, 64), QSPCA(8, 4, tile=16), "stored as 'factors' in other pieces than whole filters"),
        (nn.Linear(64, 64), QSPCA(8, 4, tile=64), "expected what SVD or SpatialSVD makes"),  # has a mean
    ],
)
def test_layers_that_cannot(module: nn.Module, method: Method, message: str) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    with pytest.raises(PlanError, match=message):
        as_two_layers(module, method.encode(weight))


def test_factors_of_another_layer() -> None:
    with pytest.raises(
        PlanError, match=r"the layer's weight is \(10, 6, 3, 3\), the factors' \(10, 7, 3, 3\)"
    ):
        as_two_layers(convolution(kernel_size=3), SVD(rank=2).encode(seeded(10, 7, 3, 3)))
