"""Fine-tuning measures on inputs that it does not train on: it never ends above its start on them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import factorpack as fp
from factorpack.format.packed_file import file_bytes
from factorpack.tune import planned_start
from factorpack.tune.held_out import hold_out
from factorpack.tune.objective import distillation
from factorpack.tune.steer import finish_packed
from tests.helpers import assert_same_encoded, seeded
from tests.tune.small_net import METHOD, Shaken, loader, perceptron, points, with_weights

LONG = fp.Schedule(epochs=6, learning_rate=1e-3)
HUGE = fp.Schedule(epochs=3, learning_rate=3.0)
NOTHING = "training did not help: the start is kept"
RATIO = 9.0
PATHS = fp.SecondOrder(step=0.1, trellis=8, try_plain=False)


def assert_same_packed(found: fp.Packed, expected: fp.Packed) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert_same_encoded(found[name], expected[name])


def tune(schedule: fp.Schedule, batches: Any = None, **settings: Any) -> fp.Packed:
    data = loader(64) if batches is None else batches
    packed = fp.compress(perceptron(), METHOD, progress=False)
    return fp.finetune(packed, perceptron(), data, schedule=schedule, progress=False, **settings)


# -- which inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_gives_an_eighth_of_its_samples(shuffle: bool) -> None:
    numbers = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=shuffle, drop_last=True)
    rest, held = hold_out(numbers, 0.125, seed=0)
    trained = torch.cat([batch for (batch,) in rest]).tolist()
    measured = torch.cat([batch for (batch,) in held]).tolist()
    assert measured == [4, 12, 20, 28, 36]
    assert len(trained) == 32  # 35 without the last three, which fill no batch
    assert not set(trained) & set(measured)
    assert (trained == sorted(trained)) != shuffle


def test_a_list_gives_its_last_batches() -> None:
    batches = [torch.full((2,), number) for number in range(16)]
    rest, held = hold_out(batches, 0.125, seed=0)
    assert [int(batch[0]) for batch in rest] == list(range(14))
    assert [int(batch[0]) for batch in held] == [14, 15]


class Endless:
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter(list(loader()))


def test_what_nothing_can_be_held_out_of() -> None:
    """Data that may give any input in any epoch, and data of one batch."""
    inputs = TensorDataset(*points())
    picked = RandomSampler(inputs, replacement=True, num_samples=8)
    some = [Endless(), DataLoader(inputs, sampler=picked), [next(iter(loader()))]]
    some.append(DataLoader(inputs, batch_size=32, drop_last=True))
    for batches in some:
        rest, held = hold_out(batches, 0.125, seed=0)
        assert rest is batches
        assert held == []
    assert tune(LONG, Endless()).tuned is None


def test_augmented_inputs_are_read_once_and_the_same_again() -> None:
    before = torch.get_rng_state()
    first, second = (hold_out(DataLoader(Shaken(32), batch_size=8), 0.125, seed=3)[1] for _ in range(2))
    assert torch.equal(first[0][0], second[0][0])
    assert torch.equal(torch.get_rng_state(), before)


# -- the best state ----------------------------------------------------------------------------------


def loss_of(packed: fp.Packed, batches: list[Any], teacher: nn.Module | None = None) -> float:
    inputs, labels = (torch.cat(values) for values in zip(*batches, strict=True))
    with torch.no_grad():
        logits = packed.load_into(perceptron()).eval()(inputs)
        target = None if teacher is None else teacher(inputs)
    return (cross_entropy(logits, labels) if target is None else distillation(logits, target)).item()


@pytest.mark.parametrize("teacher", [None, with_weights(perceptron(), seed=9)], ids=["labels", "teacher"])
def test_the_result_is_what_was_measured(teacher: nn.Module | None) -> None:
    batches = list(loader(64))
    packed = tune(fp.Schedule(epochs=3, learning_rate=1e-2), batches, teacher=teacher)
    tuned = packed.tuned
    assert tuned is not None
    assert (tuned.inputs, tuned.is_divergence) == (8, teacher is not None)
    assert tuned.epoch > 0
    assert tuned.end < tuned.start
    assert tuned.end == pytest.approx(loss_of(packed, batches[-1:], teacher), rel=1e-5)
    start = fp.compress(perceptron(), METHOD, progress=False)
    assert tuned.start == pytest.approx(loss_of(start, batches[-1:], teacher), rel=1e-5)


class BreakOff(Exception):
    pass


def test_the_best_epoch_is_kept_when_later_ones_are_worse(tmp_path: Path) -> None:
    """The loss turns round after two epochs of 7 steps; a run that broke off after that knows the best one."""
    batches = list(loader(64))
    steps, last = 0, 100

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        steps += torch.is_grad_enabled()
        if steps == last:
            raise BreakOff
        turned = steps > 2 * 7 and torch.is_grad_enabled()
        return cross_entropy(logits, labels) * (-100 if turned else 1)  # more than Adam's momentum

    schedule = fp.Schedule(epochs=6, learning_rate=1e-2)
    packed = tune(schedule, batches, loss=loss)
    assert packed.tuned is not None
    assert (packed.tuned.epoch, packed.tuned.epochs) == (2, 6)
    assert packed.tuned.end == pytest.approx(loss_of(packed, batches[-1:]), rel=1e-5)
    steps, last = 0, 25
    settings: dict[str, Any] = {"loss": loss, "checkpoint": tmp_path / "run", "checkpoint_every": 8}
    with pytest.raises(BreakOff):
        tune(schedule, batches, **settings)
    resumed = tune(schedule, batches, **settings)
    assert resumed.tuned == packed.tuned
    assert_same_packed(resumed, packed)


@pytest.mark.parametrize("rate", [3.0, 1e30])
@pytest.mark.parametrize("teacher", [None, perceptron()], ids=["labels", "teacher"])
@pytest.mark.filterwarnings("ignore:the loss is .*training ended there")
def test_a_huge_learning_rate_returns_the_start_and_says_so(teacher: nn.Module | None, rate: float) -> None:
    answers = perceptron()(points(64)[0]).argmax(1)  # what the start knows already
    batches = list(zip(points(64)[0].split(8), answers.split(8), strict=True))
    with pytest.warns(UserWarning, match=NOTHING):
        packed = tune(fp.Schedule(epochs=3, learning_rate=rate), batches, teacher=teacher)
    assert_same_packed(packed, fp.compress(perceptron(), METHOD, progress=False))
    assert packed.tuned is not None
    assert packed.tuned.epoch == 0
    assert packed.tuned.end == packed.tuned.start


def test_training_ends_after_epochs_without_gain(tmp_path: Path) -> None:
    """And a run that ended so is not trained again."""
    steps = 0

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        steps += torch.is_grad_enabled()
        return -cross_entropy(logits, labels) if torch.is_grad_enabled() else cross_entropy(logits, labels)

    schedule = fp.Schedule(epochs=50, learning_rate=1e-2, patience=2)
    for _ in range(2):
        with pytest.warns(UserWarning, match=NOTHING):
            packed = tune(schedule, list(loader(64)), loss=loss, checkpoint=tmp_path / "run")
        assert steps == 2 * 7
        assert packed.tuned is not None
        assert packed.tuned.epochs == 2


def test_the_user_s_own_held_out_inputs_and_no_labels() -> None:
    """With a teacher alone, batches may be inputs without labels."""
    inputs = list(points(64)[0].split(8))
    schedule = fp.Schedule(epochs=3, learning_rate=1e-3)
    teacher = with_weights(perceptron(), seed=9)
    found = tune(schedule, inputs[:-1], teacher=teacher, held_out=inputs[-1:])
    assert_same_packed(found, tune(schedule, list(loader(64)), teacher=teacher))
    with pytest.raises(fp.SourceError, match=r"a training batch is a Tensor, expected \(inputs, labels\)"):
        tune(schedule, inputs)


@pytest.mark.parametrize(
    "settings",
    [
        {"codes": "cold"},
        {"codes": "frozen", "rate": 1.0},
        {"shrink_by": "luck"},
        {"held_out_share": 0.9},
        {"held_out_share": "few"},
        {"patience": 0},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(fp.PlanError, match=next(iter(settings))):
        fp.Schedule(**settings)


# -- frozen codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [METHOD, fp.Scalar(4), fp.methods.LSQ(3), fp.methods.TTQ(0.1), PATHS],
    ids=["qspca", "scalar", "lsq", "ttq", "trellis"],
)
def test_frozen_codes_stay_and_their_scales_learn(method: Any, tmp_path: Path) -> None:
    """At any learning rate, and along a trellis too: the file is read back as it was measured."""
    batches = list(loader(64))
    before, packed = (fp.compress(perceptron(), method, progress=False) for _ in range(2))
    assert any(each.trellis for each in before.values()) == isinstance(method, fp.SecondOrder)
    schedule = fp.Schedule(epochs=4, learning_rate=3e-2, codes="frozen")
    fp.finetune(packed, perceptron(), batches, schedule=schedule, progress=False)
    coded = [name for name in before if before[name].bits]
    for name in coded:
        for part in before[name].bits:
            assert torch.equal(packed[name].parts[part], before[name].parts[part])
    assert any(
        not torch.equal(packed[name].parts[part], before[name].parts[part])
        for name in coded
        for part in set(before[name].parts) - set(before[name].bits)
    )
    assert not torch.equal(packed["0.bias"].parts["values"], before["0.bias"].parts["values"])
    fp.save(packed, tmp_path / "net")
    assert packed.tuned is not None
    assert packed.tuned.end < packed.tuned.start
    assert loss_of(fp.load(tmp_path / "net"), batches[-1:]) == pytest.approx(packed.tuned.end, rel=1e-5)


def test_rates_are_relative_where_codes_are_frozen() -> None:
    """A bias a thousand times larger moves a thousand times as far."""
    moved = []
    for size in (1.0, 1000.0):
        net = nn.Sequential(nn.Linear(16, 4))
        with_weights(net)[0].bias.data *= size  # type: ignore[operator, union-attr]
        packed = fp.compress(net, fp.Scalar(4), progress=False)
        schedule = fp.Schedule(epochs=1, learning_rate=1e-3, codes="frozen", held_out_share=0.0)
        arguments: dict[str, Any] = {"schedule": schedule, "loss": lambda logits, _: logits.sum()}
        first = packed["0.bias"].parts["values"]
        fp.finetune(packed, net, list(loader()), progress=False, **arguments)
        moved.append((first - packed["0.bias"].parts["values"]).mean().item())
    assert moved[1] == pytest.approx(1000 * moved[0], rel=1e-3)


# -- a target size -----------------------------------------------------------------------------------


def wide(seed: int = 0) -> nn.Module:
    layers = [
        nn.Linear(16, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    ]
    return with_weights(nn.Sequential(*layers), seed).eval()


BATCHES = list(seeded(128, 16, seed=100).split(16))


@functools.cache
def planned() -> fp.Packed:
    """The plan for the target from the inputs that are trained on. Not to be changed."""
    return fp.compress(wide(), ratio=RATIO, calibration=BATCHES[:-1], progress=False)


def shrink(learning_rate: float = 1e-3, **settings: Any) -> fp.Packed:
    packed = fp.compress(wide(), fp.Scalar(6), progress=False)
    schedule = fp.Schedule(epochs=2, learning_rate=learning_rate, target_ratio=RATIO)
    arguments: dict[str, Any] = {"teacher": wide(), "schedule": schedule, "batches": BATCHES} | settings
    return fp.finetune(packed, wide(50), arguments.pop("batches"), progress=False, **arguments)


def divergence(packed: fp.Packed) -> float:
    with torch.no_grad():
        logits, target = packed.load_into(wide()).eval()(BATCHES[-1]), wide()(BATCHES[-1])
    return distillation(logits, target).item()


def test_a_target_size_starts_from_its_plan_and_is_never_worse(tmp_path: Path) -> None:
    packed = shrink()
    assert packed.tuned is not None
    assert packed.tuned.start == pytest.approx(divergence(planned()), rel=1e-4)
    assert divergence(packed) <= divergence(planned())
    fp.save(packed, tmp_path / "net.safetensors")
    assert packed.size().file_ratio >= RATIO
    assert packed["1.running_var"].kind == "constant"  # norms are folded, as in any plan


def test_the_plan_is_the_result_where_training_does_not_help() -> None:
    with pytest.warns(UserWarning, match=NOTHING):
        packed = shrink(learning_rate=3.0)
    assert_same_packed(packed, finish_packed(dict(planned()), planned().aliases, None))


def test_without_the_original_the_file_itself_is_planned() -> None:
    """Another net's answers are to be learned: its weights are not what the file holds."""
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    given = fp.compress(wide(), fp.Scalar(6), progress=False).load_into(wide())
    start = fp.compress(given, ratio=RATIO, calibration=BATCHES[:-1], progress=False)
    found = shrink(learning_rate=3e-2, teacher=net)
    assert found.tuned is not None
    with torch.no_grad():
        before = distillation(start.load_into(wide())(BATCHES[-1]), net(BATCHES[-1])).item()
    assert found.tuned.start == pytest.approx(before, rel=1e-4)
    assert found.tuned.end < 0.9 * found.tuned.start
    assert file_bytes(found, found.aliases) <= found.size().original_bytes / RATIO  # much has changed


def test_a_file_that_is_small_enough_is_trained_as_it_is() -> None:
    plain = fp.Planner(trellis=0)  # a path would become plain codes first
    given = fp.compress(wide(), ratio=RATIO, calibration=BATCHES[:-1], planner=plain, progress=False)
    before = divergence(given)
    schedule = fp.Schedule(epochs=2, learning_rate=1e-3, target_ratio=8.5, batch_norm="frozen")
    packed = fp.finetune(given, wide(), BATCHES, teacher=wide(), schedule=schedule, progress=False)
    assert packed.tuned is not None
    assert packed.tuned.start == pytest.approx(before, rel=1e-4)
    assert file_bytes(packed, packed.aliases) <= packed.size().original_bytes / 8.5


def test_a_plan_needs_inputs_to_measure_on() -> None:
    with pytest.raises(fp.SourceError, match="give held_out batches"):
        fp.finetune(
            fp.compress(perceptron(), METHOD, progress=False),
            perceptron(),
            Endless(),
            schedule=fp.Schedule(target_ratio=5.0),
        )


def test_a_planned_run_that_broke_off_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made once: it waits in the checkpoint, and so does the best state."""
    plans = 0
    plan = planned_start.compress

    def count(*arguments: Any, **settings: Any) -> fp.Packed:
        nonlocal plans
        plans += 1
        return plan(*arguments, **settings)

    monkeypatch.setattr(planned_start, "compress", count)
    left = 1000

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal left
        left -= 1
        if not left:
            raise BreakOff
        return cross_entropy(logits, labels)

    schedule = fp.Schedule(epochs=3, learning_rate=1e-3, target_ratio=RATIO, teacher_share=0.5)
    answers = [(batch, wide(7)(batch).argmax(1)) for batch in BATCHES]
    settings: dict[str, Any] = {"schedule": schedule, "loss": loss, "batches": answers}
    whole = shrink(**settings)
    settings |= {"checkpoint": tmp_path / "run", "checkpoint_every": 5}
    for calls in (2, 20):  # in the first step, before anything is saved but the plan, and in the third epoch
        left = calls
        with pytest.raises(BreakOff):
            shrink(**settings)
    left = 1000
    resumed = shrink(**settings)
    assert plans == 2
    assert_same_packed(resumed, whole)
    assert resumed.tuned == whole.tuned
