"""Training for size: a rate that is given, a rate that is steered to a file's size, and what may go wrong."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import factorpack as fp
from factorpack.decoding import decode
from factorpack.format.packed_file import file_bytes
from factorpack.packed import Packed
from factorpack.record import Encoded
from factorpack.tune import steer
from factorpack.tune.steer import Controller
from factorpack.weight import Weight
from tests.helpers import assert_same_encoded, seeded
from tests.tune.small_net import loader, perceptron, state_in, with_weights

FACTORS = fp.QSPCA(9, 4, tile=16, codebook_bits=8)
SCALAR = fp.Scalar(4)
FAST = fp.Schedule(epochs=4, learning_rate=1.5e-2)
STEERED = fp.Schedule(epochs=6, learning_rate=8e-3)


def wide(width: int = 256) -> nn.Module:
    """Large enough that a header is a small share of its file: 74 thousand weights."""
    return with_weights(
        nn.Sequential(
            nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )
    )


def data(count: int = 320) -> DataLoader[tuple[Tensor, ...]]:
    inputs = seeded(count, 24, seed=100)
    labels = (inputs @ seeded(24, 4, seed=101)).argmax(1)
    return DataLoader(TensorDataset(inputs, labels), batch_size=16)


def tune(schedule: fp.Schedule, method: Any = SCALAR, width: int = 256, **settings: Any) -> Packed:
    net = wide(width)
    packed = fp.compress(net, method, progress=False)
    schedule = replace(schedule, shrink_by="training", held_out_share=0.0)
    return fp.finetune(packed, net, data(), schedule=schedule, progress=False, **settings)


@functools.cache
def tuned(schedule: fp.Schedule, method: Any = SCALAR, width: int = 256) -> Packed:
    """What `tune` gives, made once: it is the same every time. Not to be changed."""
    return tune(schedule, method, width)


def error(packed: Packed) -> float:
    net = packed.load_into(wide()).eval()
    inputs, labels = data().dataset.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        return cross_entropy(net(inputs), labels).item()


# -- a rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "rates"), [(SCALAR, (0.02, 0.2)), (FACTORS, (0.2,))], ids=["scalar", "factors"]
)
def test_a_rate_makes_the_file_smaller_and_keeps_the_loss_sane(method: Any, rates: tuple[float, ...]) -> None:
    start = fp.compress(wide(), method, progress=False)
    plain = tuned(FAST, method)
    sizes = [file_bytes(plain, plain.aliases)]
    for rate in rates:
        short = tune(replace(FAST, rate=rate), method)
        sizes.append(file_bytes(short, short.aliases))
        assert error(short) < error(start) / 2
    assert sizes[1] < 0.9 * sizes[0]
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_rate_of_zero_changes_nothing() -> None:
    found = tune(replace(FAST, rate=0.0, target_ratio=0.0))
    for name, encoded in tuned(FAST).items():
        assert_same_encoded(found[name], encoded)


def test_rows_that_die_are_removed() -> None:
    short = tune(replace(FAST, rate=20.0), FACTORS)
    ranks = [each.parts["latent"].shape[0] for each in short.values() if each.kind == "factors"]
    assert min(ranks) < 9
    for encoded in short.values():
        if encoded.kind == "factors" and encoded.parts["latent"].shape[0] > 1:
            assert encoded.parts["latent"].any(1).all()


# -- a target ----------------------------------------------------------------------------------------


def halved(packed: Packed) -> Packed:
    """Biases in FP16, as something still to be done to a trained model."""
    kept = {
        name: fp.Keep("float16").encode(Weight(decode(packed[name]))) for name in packed if "bias" in name
    }
    return Packed({name: kept.get(name, packed[name]) for name in packed}, packed.aliases)


@pytest.mark.parametrize(
    ("method", "ratio", "finish"), [(SCALAR, 14.0, None), (SCALAR, 25.0, halved), (FACTORS, 20.0, None)]
)
def test_the_file_meets_its_target(tmp_path: Path, method: Any, ratio: float, finish: Any) -> None:
    """What is finished is what is measured."""
    packed = tune(replace(STEERED, target_ratio=ratio), method, finish=finish)
    assert (packed["0.bias"].parts["values"].dtype == torch.float16) == (finish is halved)
    fp.save(packed, tmp_path / "net.safetensors")
    budget = packed.size().original_bytes / ratio
    assert 0.99 * budget <= (tmp_path / "net.safetensors").stat().st_size <= budget
    assert error(packed) < error(fp.compress(wide(), method, progress=False)) / 2


def test_a_few_steps_are_not_enough_to_train_but_the_file_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What training leaves over is closed by the codes that lose least, while it can still make up for it."""
    events: list[str] = []
    trim = steer.trim

    def noted(*arguments: Any) -> int:
        events.append("trim")
        return trim(*arguments)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        events.append("step")
        return cross_entropy(logits, labels)

    monkeypatch.setattr(steer, "trim", noted)
    with pytest.warns(UserWarning, match=r"after 14 of 20 steps the file is still .* times its target"):
        packed = tune(fp.Schedule(epochs=1, learning_rate=1e-5, target_ratio=20.0), loss=loss)
    budget = packed.size().original_bytes / 20.0
    assert 0.99 * budget <= file_bytes(packed, packed.aliases) <= budget
    assert events[:15] == ["step"] * 14 + ["trim"]
    last = len(events) - events[::-1].index("step")
    assert events.count("step") == 20
    assert events[:last].count("trim") > events[last:].count("trim")


def test_a_target_that_is_met_already() -> None:
    packed = tune(replace(FAST, epochs=1, target_ratio=4.0))
    assert file_bytes(packed, packed.aliases) <= packed.size().original_bytes / 4.0


def test_a_target_no_codes_can_meet() -> None:
    """Said before the first step, with what is in the way."""

    def never(*_: Tensor) -> Tensor:
        raise AssertionError

    with pytest.raises(
        fp.PlanError, match=r"target_ratio 500 allows 585 bytes, and even with all codes zero"
    ):
        tune(replace(FAST, target_ratio=500.0), loss=never)


def test_indices_of_codewords_cannot_be_had_for_less() -> None:
    """Training leaves them, so a target they do not meet is refused, and one they do needs no steering."""
    start = fp.compress(wide(), fp.methods.VQ(16), progress=False)
    ratio = start.size().original_bytes / file_bytes(start, start.aliases)
    packed = tune(replace(FAST, epochs=1, target_ratio=0.98 * ratio), fp.methods.VQ(16))
    for name, encoded in start.items():
        if encoded.kind == "codewords":
            assert torch.equal(packed[name].parts["indices"], encoded.parts["indices"])
    with pytest.raises(fp.PlanError, match="even with all codes zero"):
        tune(replace(FAST, target_ratio=1.1 * ratio), fp.methods.VQ(16))


def test_the_controller_follows_a_size_that_answers_late() -> None:
    """A size that a rate of 0.4 holds, seen three looks late."""
    controller, sizes = Controller(1e-4), [1000.0] * 4
    for look in range(400):
        controller.update(sizes[-4], sizes[-1], 100.0, max(100 - look, 20))
        sizes.append(sizes[-1] * math.exp(0.02 - 0.05 * controller.rate))
    assert all(98 <= size <= 102 for size in sizes[-50:])


@pytest.mark.parametrize(
    "settings", [{"rate": -1.0}, {"rate": math.nan}, {"rate": "low"}, {"target_ratio": -2.0}]
)
def test_impossible_rates_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(fp.PlanError, match=next(iter(settings))):
        fp.Schedule(**settings)


# -- going on, and folded norms ----------------------------------------------------------------------


class BreakOff(Exception):
    pass


def test_a_steered_run_that_broke_off_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """Last saved after an odd number of steps: the tables are then those of the step before.

    It breaks off twice, while a rate is steered and while codes are trimmed.
    """
    schedule = fp.Schedule(epochs=11, learning_rate=1e-2, target_ratio=9.0)  # 220 steps: a look every 2
    seen = 0

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        if seen in (35, 35 + 208 - 33):  # 33 steps were saved
            raise BreakOff
        return cross_entropy(logits, labels)

    settings: dict[str, Any] = {"width": 64, "checkpoint": tmp_path / "run", "checkpoint_every": 3}
    for saved in (33, 207):
        with pytest.raises(BreakOff):
            tune(schedule, loss=loss, **settings)
        assert state_in(tmp_path / "run")["done"] == saved
    resumed = tune(schedule, **settings)
    again = tune(schedule, **settings)  # the finished run: only what closes its gap is done again
    for name, encoded in tuned(schedule, width=64).items():
        assert_same_encoded(resumed[name], encoded)
        assert_same_encoded(again[name], encoded)


@pytest.mark.parametrize("name", ["rate", "target_ratio"])
def test_a_checkpoint_of_another_rate(tmp_path: Path, name: str) -> None:
    short = replace(FAST, epochs=1)
    tune(short, checkpoint=tmp_path / "run")
    with pytest.raises(fp.SourceError, match="belongs to another run"):
        tune(replace(short, **{name: 5.0}), checkpoint=tmp_path / "run")


def folded() -> tuple[nn.Module, Packed]:
    """A variance of one and a mean of zero, each stored as one number."""
    net = perceptron(norm=True)
    packed = fp.compress(net, SCALAR, progress=False)
    constants = {
        name: Encoded("constant", (32,), torch.float32, {"value": packed[name].parts["values"][:1]})
        for name in ("1.running_mean", "1.running_var")
    }
    packed.replace({name: constants.get(name, packed[name]) for name in packed})
    return net, packed


def test_folded_norms_are_not_trained_with_batch_statistics() -> None:
    net, packed = folded()
    with pytest.raises(fp.PlanError, match=r"'1.running_var' is a constant.*batch_norm='frozen'"):
        fp.finetune(packed, net, loader(), schedule=fp.Schedule(epochs=1), progress=False)


def test_folded_norms_are_trained_frozen_and_stay_constants() -> None:
    net, packed = folded()
    before = dict(packed)
    schedule = fp.Schedule(epochs=1, learning_rate=1e-2, batch_norm="frozen")
    fp.finetune(packed, net, loader(), schedule=schedule, progress=False)
    for name in ("1.running_mean", "1.running_var"):
        assert_same_encoded(packed[name], before[name])
    assert not torch.equal(packed["1.weight"].parts["values"], before["1.weight"].parts["values"])
