"""Every method's packed form can be trained end to end, saved and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import factorpack as fp
from factorpack.format.streams import encode_part
from factorpack.methods import LSQ, RDOQ, SVD, TTQ, ABCNet, Method, Prune, SpatialSVD
from tests.helpers import assert_same_encoded
from tests.tune.small_net import loader, perceptron, points

METHODS: dict[str, Method] = {
    "lsq": LSQ(2),
    "lsq, one step": LSQ(3, channels=False),
    "signs": LSQ(1),
    "ttq": TTQ(0.3),
    "abcnet": ABCNet(3, channels=True),
    "prune": Prune(0.5, 4),
    "rdoq": RDOQ(0.7),
    "svd": SVD(rank=4),
    "svd, wide": SVD(rank=4, bits=16),
    "spatial_svd": SpatialSVD(rank=4),
}


def loss(packed: fp.Packed) -> float:
    inputs, labels = points()
    with torch.no_grad():
        return cross_entropy(packed.load_into(perceptron()).eval()(inputs), labels).item()


def tuned(method: Method, **settings: float) -> tuple[fp.Packed, fp.Packed]:
    """Before and after; both layers get the method, whatever the habits say."""
    before, after = (fp.compress(perceptron(), method, layers={"*.weight": method}) for _ in range(2))
    schedule = fp.Schedule(epochs=6, learning_rate=1e-2, held_out_share=0.0, **settings)  # type: ignore[arg-type]
    fp.finetune(after, perceptron(), loader(), schedule=schedule, progress=False)
    return before, after


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_training_helps_and_keeps_the_form(method: Method, tmp_path: Path) -> None:
    before, after = tuned(method)
    assert loss(after) < 0.9 * loss(before)
    name = "0.weight"
    assert after[name].kind == before[name].kind != "keep"
    assert after[name].bits == before[name].bits
    assert any(
        not torch.equal(after[name].parts[part], before[name].parts[part]) for part in after[name].bits
    )
    fp.save(after, tmp_path / "file")
    assert_same_encoded(fp.load(tmp_path / "file")[name], after[name])


@pytest.mark.parametrize("method", [TTQ(0.3), ABCNet(5), LSQ(4), Prune(0.2, 4)], ids=str)
def test_a_rate_makes_codes_shorter(method: Method) -> None:
    free, dear = (tuned(method, rate=rate)[1] for rate in (0.0, 8.0))
    sizes = [
        sum(len(encode_part(packed[name].parts["codes"], 4)[1]) for name in ("0.weight", "2.weight"))
        for packed in (free, dear)
    ]
    assert sizes[1] < 0.9 * sizes[0]
