"""Layers of every class that can be packed, methods for every kind, and a model of one layer in each mode."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.methods import Method
from factorpack.runtime.apply import Applied
from tests.helpers import seeded

METHODS: dict[str, Method] = {
    "factors": fp.QSPCA(4, 3, tile=8),
    "factors a column": fp.QSPCA(5, 4, tile=8, center=False, latent_scales="column"),
    "factors over kernels": fp.SecondOrder(step=0.2, tile=9),
    "scalar": fp.Scalar(3),
    "one scale": fp.methods.LSQ(5, channels=False),
    "wide codes": fp.SecondOrder(step=0.001, price=0.0),
    "levels": fp.methods.ABCNet(3, channels=True),
    "one bit": fp.methods.LSQ(1),
    "codewords": fp.methods.VQ(8, tile=5, iterations=2),
    "sums of codewords": fp.methods.AQ(2, 8, tile=4, iterations=1),
    "svd": fp.methods.SVD(rank=3),
    "spatial": fp.methods.SpatialSVD(rank=3),
}

LAYERS: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Linear(24, 10), seeded(3, 24)),
    "linear, more dimensions": (nn.Linear(16, 12, bias=False), seeded(2, 3, 16)),
    "conv1d": (nn.Conv1d(8, 12, 3, padding=1), seeded(2, 8, 9)),
    "conv2d": (nn.Conv2d(8, 12, 3, stride=2, padding=1), seeded(2, 8, 9, 7)),
    "conv3d": (nn.Conv3d(4, 6, (1, 3, 3)), seeded(1, 4, 3, 5, 5)),
    "grouped": (nn.Conv2d(8, 12, 3, groups=2, dilation=2, padding="same"), seeded(2, 8, 6, 6)),
    "depthwise": (nn.Conv2d(16, 16, 3, groups=16), seeded(2, 16, 6, 6)),
    "reflected": (nn.Conv2d(8, 12, 3, padding=1, padding_mode="reflect"), seeded(1, 8, 5, 5)),
    "unbatched": (nn.Conv2d(8, 12, 3), seeded(8, 5, 5)),
    "pointwise": (nn.Conv2d(24, 16, 1, stride=2), seeded(2, 24, 5, 5)),
    "transposed": (nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1), seeded(2, 8, 4, 4)),
    "transposed, grouped": (nn.ConvTranspose1d(8, 12, 3, groups=4), seeded(2, 8, 5)),
    "transposed 3d": (nn.ConvTranspose3d(4, 4, 2), seeded(1, 4, 2, 2, 2)),
    "embedding": (nn.Embedding(30, 16, padding_idx=3), torch.tensor([[1, 3], [29, 0]])),
}


def compress(model: nn.Module, method: Method) -> fp.Packed:
    """All weights by one method, the first convolution and the classifier too."""
    return fp.compress(model, method, layers={"*weight": method}, progress=False)


def both(layer: nn.Module, method: Method, mode: str, inputs: Tensor) -> tuple[Applied, Tensor, Tensor]:
    """What applying did, its answers, and those of the weights decoded by `load_into`."""
    model = nn.Sequential(copy.deepcopy(layer))
    packed = compress(model, method)
    expected = packed.load_into(copy.deepcopy(model))(inputs)
    applied = packed.apply(model, mode, example=inputs)  # type: ignore[arg-type]
    return applied, applied.model(inputs), expected
