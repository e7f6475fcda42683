"""A new kind is one object in `KINDS`: files, decoding, sizes, reports, the runtime and training ask it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.decoding import decode
from factorpack.kinds import KINDS
from factorpack.kinds.base import Kind, Specs, cast_clamped, expect_codes, expect_scale, expect_shape
from factorpack.onnx.sketch import Type
from factorpack.onnx.writers import saves
from factorpack.record import Encoded
from factorpack.report.facts import gather
from factorpack.size import ITEMS
from factorpack.tiles import Layout
from factorpack.tune.trainable import TRAINABLE
from tests.helpers import assert_same_encoded, assert_same_tensor, seeded


class Differences(Kind):
    """The running sum of codes along each row, times one scale."""

    name = "differences"
    title = "differences between neighbours"
    items: ClassVar[Mapping[str, str]] = {"deltas": "latent", "unit": "scales"}

    def decode(self, encoded: Encoded) -> Tensor:
        rows = encoded.parts["deltas"].float().cumsum(1) * encoded.parts["unit"].float()
        return cast_clamped(encoded.layout.from_tiles(rows.T), encoded.dtype)

    def check_parts(self, layout: Layout, parts: Specs) -> None:
        expect_codes(parts, "deltas")
        expect_shape(parts, "deltas", (layout.outputs, layout.numel // layout.outputs))
        expect_scale(parts, "unit", {(1, 1)})

    def describe(self, encoded: Encoded) -> str:
        return f"differences of {encoded.bits['deltas']} bits"


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, Differences.name, Differences())


def coded() -> Encoded:
    deltas = seeded(10, 6).mul(2).round().clamp(-8, 7).to(torch.int8)
    parts = {"deltas": deltas, "unit": torch.full((1, 1), 0.125)}
    return Encoded("differences", (10, 6), torch.float32, parts, {"deltas": 4})


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 10))


@pytest.fixture
def packed(tmp_path: Path) -> fp.Packed:
    """A small network with a layer of a kind that is trained, and one of the new kind."""
    tensors = dict(fp.compress(net(), fp.Scalar(4), progress=False).items())
    tensors["2.weight"] = coded()
    fp.save(fp.Packed(tensors, {}), tmp_path / "net.packed.safetensors")
    return fp.load(tmp_path / "net.packed.safetensors")


def test_every_kind_has_its_own_name() -> None:
    assert {name: kind.name for name, kind in KINDS.items()} == {name: name for name in KINDS}
    assert all(set(kind.items.values()) <= set(ITEMS) for kind in KINDS.values())


def test_it_is_stored_and_decoded(packed: fp.Packed) -> None:
    found = packed["2.weight"]
    assert_same_encoded(found, coded())
    expected = coded().parts["deltas"].double().cumsum(1) / 8
    assert_same_tensor(decode(found), expected.float())
    assert_same_tensor(packed.state_dict()["2.weight"], expected.float())


def test_its_parts_are_checked(tmp_path: Path) -> None:
    parts = {"deltas": coded().parts["deltas"], "unit": torch.ones(2, 1)}
    wrong = Encoded("differences", (10, 6), torch.float32, parts, {"deltas": 4})
    with pytest.raises(fp.FormatError, match="part 'unit' has shape"):
        fp.save(fp.Packed({"w": wrong}, {}), tmp_path / "file")


def test_its_size_is_counted(packed: fp.Packed) -> None:
    line = next(line for line in packed.size().tensors if line.name == "2.weight")
    assert line.fixed_bits == dict.fromkeys(ITEMS, 0) | {"latent": 60 * 4, "scales": 32}
    assert line.words == "differences of 4 bits"
    assert sum(each.bytes for each in packed.size().tensors) == packed.size().file_bytes


def test_it_is_reported(packed: fp.Packed) -> None:
    state = net().state_dict() | {"2.weight": decode(coded())}
    fact = next(fact for fact in gather(packed, state).tensors if fact.name == "2.weight")
    assert (fact.kind, fact.words) == ("differences", "differences of 4 bits")
    assert (fact.error, fact.zeros, fact.problem) == (0.0, None, "")


def test_it_runs_from_its_codes(packed: fp.Packed) -> None:
    inputs = seeded(3, 4)
    expected = packed.load_into(net())(inputs)
    applied = packed.apply(net(), "packed")
    assert {layer.mode for layer in applied.layers} == {"packed"}
    assert_same_tensor(applied.model(inputs).detach(), expected.detach())


@pytest.mark.parametrize("target_ratio", [0.0, 0.2])
def test_it_stays_fixed_while_other_layers_are_trained(packed: fp.Packed, target_ratio: float) -> None:
    assert Differences.name not in TRAINABLE
    data = [(seeded(8, 4, seed=step), torch.zeros(8, dtype=torch.long)) for step in range(4)]
    before = decode(packed["0.weight"])
    schedule = fp.Schedule(epochs=2, learning_rate=1e-2, target_ratio=target_ratio)
    tuned = fp.finetune(packed, net(), data, schedule=schedule, progress=False)
    assert_same_encoded(tuned["2.weight"], coded())
    assert not torch.equal(decode(tuned["0.weight"]), before)


def test_it_stays_plain_values_in_onnx() -> None:
    assert not saves(coded(), Type.FLOAT)
