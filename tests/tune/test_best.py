"""The best state of a run, as a checkpoint holds it."""

from __future__ import annotations

import io
from dataclasses import fields

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.methods import Method
from factorpack.record import Encoded
from factorpack.tune.best import as_state, from_state
from tests.helpers import assert_same_tensor, seeded

METHODS = [
    fp.QSPCA(rank=4, latent_bits=3, tile=9),
    fp.SecondOrder(step=0.05, trellis=8),
    fp.Scalar(bits=4),
    fp.methods.VQ(),
    fp.methods.SpatialSVD(rank=2),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_packed_model_is_read_back_from_its_state(method: Method) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3), nn.Linear(8, 32).half()
    )
    net[2].weight.data = seeded(32, 16, 3, 3)
    packed = fp.compress(net, method, progress=False)
    packed.aliases["tied"] = "2.weight"
    file = io.BytesIO()
    torch.save(as_state(packed), file)
    found = from_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert found.aliases == packed.aliases
    assert list(found) == list(packed)
    for name, encoded in packed.items():
        for each in fields(Encoded):
            if each.name != "parts":
                assert getattr(found[name], each.name) == getattr(encoded, each.name), each.name
        assert found[name].parts.keys() == encoded.parts.keys()
        for part, values in encoded.parts.items():
            assert_same_tensor(found[name].parts[part], values)
