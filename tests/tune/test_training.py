"""Fine-tuning: it learns, it goes on where it was killed, and it says what is wrong."""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

import factorpack as fp
from factorpack.format.checked_file import write_checked
from factorpack.tune.accuracy import evaluate
from factorpack.tune.checkpoint import load_checkpoint, random_state, restore_random_state
from factorpack.tune.objective import distillation
from tests.forking import run_forked
from tests.helpers import assert_close, assert_same_encoded, assert_same_tensor, flipped, seeded
from tests.tune.small_net import (
    METHOD,
    build,
    loader,
    perceptron,
    points,
    state_in,
    with_weights,
    write_images,
)
from tests.tune.two_processes import tuned

ROOT = Path(__file__).parents[2]
on_all = partial(fp.Schedule, held_out_share=0.0)
"""A schedule that trains on all inputs and ends with the last state."""
FAST = on_all(epochs=2, learning_rate=1e-2)


def tune(
    schedule: fp.Schedule = FAST,
    *,
    batches: Any = None,
    net: nn.Module | None = None,
    method: Any = METHOD,
    **settings: Any,
) -> fp.Packed:
    net = net or perceptron()
    packed = fp.compress(net, method)
    data = loader() if batches is None else batches
    return fp.finetune(packed, net, data, schedule=schedule, progress=False, **settings)


def assert_same_packed(found: fp.Packed, expected: fp.Packed) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert_same_encoded(found[name], expected[name])


def differs(found: fp.Packed, other: fp.Packed) -> bool:
    return any(
        not torch.equal(found[name].parts[part], other[name].parts[part])
        for name in found
        for part in found[name].parts
    )


def error(packed: fp.Packed, inputs: Tensor, labels: Tensor) -> float:
    net = packed.load_into(perceptron()).eval()
    with torch.no_grad():
        return cross_entropy(net(inputs), labels).item()


# -- learning ----------------------------------------------------------------------------------------


def test_the_loss_falls() -> None:
    before = fp.compress(perceptron(), METHOD)
    assert error(tune(), *points()) < error(before, *points())


def test_the_packed_model_is_updated_in_place(tmp_path: Path) -> None:
    """Loaded from a file or not, it is what was trained, and the file is left alone."""
    net, path = perceptron(), tmp_path / "net.safetensors"
    fp.save(fp.compress(net, METHOD), path)
    stored = path.read_bytes()
    packed = fp.load(path)
    assert fp.finetune(packed, net, loader(), schedule=FAST, progress=False) is packed
    assert packed.path is None
    assert_same_packed(packed, tune())
    assert path.read_bytes() == stored


def test_accuracy_after_saving_and_loading_is_what_was_measured(tmp_path: Path) -> None:
    batches = loader(64)
    packed = tune(on_all(epochs=5, learning_rate=1e-2), batches=batches)
    measured = evaluate(packed.load_into(perceptron()), batches, progress=False)
    fp.save(packed, tmp_path / "net.safetensors")
    net = fp.load(tmp_path / "net.safetensors").load_into(perceptron()).eval()
    inputs, labels = points(64)
    right = int((net(inputs).argmax(1) == labels).sum())
    loaded = evaluate(net, batches, progress=False)
    assert (loaded.top1, loaded.top5, loaded.samples) == (measured.top1, 1.0, 64)
    assert measured.top1 == right / 64
    assert measured.samples == 64


def test_the_same_run_twice() -> None:
    assert_same_packed(
        tune(batches=loader(shuffle=True), net=perceptron(drop=0.3)),
        tune(batches=loader(shuffle=True), net=perceptron(drop=0.3)),
    )
    other = on_all(epochs=2, learning_rate=1e-2, seed=1)
    assert differs(tune(batches=loader(shuffle=True)), tune(other, batches=loader(shuffle=True)))


def test_the_user_s_own_loss() -> None:
    """Any loss, on any kind of labels."""
    inputs, targets = points()[0], seeded(32, 4, seed=7)
    batches = list(zip(inputs.split(8), targets.split(8), strict=True))
    seen: list[Tensor] = []

    def loss(answers: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels)
        return (answers - labels).square().mean()

    packed = tune(batches=batches, loss=loss)
    assert torch.equal(torch.cat(seen), targets.repeat(2, 1))
    before, after = (
        (each.load_into(perceptron())(inputs) - targets).square().mean().item()
        for each in (fp.compress(perceptron(), METHOD), packed)
    )
    assert after < before


@pytest.mark.parametrize("final_share", [1e-3, 0.0, 1.0])
def test_the_rate_is_half_a_cosine(final_share: float) -> None:
    schedule = fp.Schedule(final_share=final_share)
    assert schedule.decay(0, 100) == 1.0
    assert schedule.decay(50, 100) == pytest.approx((1 + final_share) / 2, rel=1e-15)
    assert schedule.decay(100, 100) == final_share
    for step in range(100):
        expected = final_share + (1 - final_share) * (1 + math.cos(math.pi * step / 100)) / 2
        assert schedule.decay(step, 100) == pytest.approx(expected, rel=1e-15)


def test_the_rate_is_the_one_the_steps_use() -> None:
    """Under a constant gradient each of Adam's steps is the rate itself, over all epochs."""
    schedule = on_all(epochs=3, learning_rate=1e-2, final_share=0.1)
    packed = tune(schedule, loss=lambda answers, _: answers.sum())
    steps = 3 * 4
    moved = perceptron().get_parameter("2.bias").detach() - packed["2.bias"].parts["values"]
    expected = 1e-2 * sum(schedule.decay(step, steps) for step in range(steps))
    assert_close(moved, torch.full((4,), expected), torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_distillation_is_the_divergence_from_the_teacher(temperature: float) -> None:
    student, teacher = seeded(6, 5, dtype=torch.float64), seeded(6, 5, dtype=torch.float64, seed=1)
    expected = 0.0
    for mine, theirs in zip(student.tolist(), teacher.tolist(), strict=True):
        q = [math.exp(each / temperature) for each in mine]
        p = [math.exp(each / temperature) for each in theirs]
        for a, b in zip(p, q, strict=True):
            expected += a / sum(p) * math.log(a / sum(p) / (b / sum(q)))
    expected *= temperature**2 / 6
    assert distillation(student, teacher, temperature).item() == pytest.approx(expected, rel=1e-12)
    assert distillation(teacher, teacher, temperature).item() == pytest.approx(0.0, abs=1e-15)


def test_a_teacher_alone_needs_no_labels() -> None:
    inputs, labels = points()
    wrong = [(batch, torch.full((8,), -7)) for batch in inputs.split(8)]
    packed = tune(batches=wrong, teacher=perceptron())
    right = list(zip(inputs.split(8), labels.split(8), strict=True))
    assert_same_packed(tune(batches=right, teacher=perceptron()), packed)
    answers = perceptron()(inputs).detach()
    before, after = (
        distillation(each.load_into(perceptron())(inputs), answers).item()
        for each in (fp.compress(perceptron(), METHOD), packed)
    )
    assert after < before


def test_a_teacher_and_labels() -> None:
    """The shares are of the loss: at 0 the teacher is not there, between it counts with the labels."""
    none = tune()
    schedules = {
        share: on_all(epochs=2, learning_rate=1e-2, teacher_share=share) for share in (0.0, 0.5, 1.0)
    }
    found = {share: tune(schedule, teacher=perceptron(norm=False)) for share, schedule in schedules.items()}
    assert_same_packed(found[0.0], none)
    assert differs(found[0.5], found[0.0])
    assert differs(found[0.5], found[1.0])


def test_the_shares_add_up() -> None:
    """A loss on labels that is the divergence itself gives what the teacher alone gives."""
    inputs, _ = points()
    teacher = perceptron().eval()
    answers = teacher(inputs).detach()
    batches = list(zip(inputs.split(8), answers.split(8), strict=True))
    half = on_all(epochs=1, learning_rate=1e-2, teacher_share=0.5)
    mixed = tune(half, batches=batches, teacher=teacher, loss=distillation)
    alone = tune(on_all(epochs=1, learning_rate=1e-2), batches=batches, teacher=teacher)
    assert_same_packed(mixed, alone)  # halves and their sum are exact


def test_the_model_may_be_its_own_teacher() -> None:
    """It is loaded with the packed weights and trained, the teacher's answers stay the original's."""
    net = perceptron()
    assert_same_packed(tune(net=net, teacher=net), tune(teacher=perceptron()))


@pytest.mark.parametrize("mode", ["frozen", "train"])
def test_batch_statistics(mode: Any) -> None:
    schedule = on_all(epochs=2, learning_rate=1e-2, batch_norm=mode)
    packed = tune(schedule, net=perceptron(norm=True))
    changed = {
        name: not torch.equal(packed[f"1.{name}"].parts["values"], before)
        for name, before in perceptron(norm=True)[1].state_dict().items()  # type: ignore[index]
    }
    statistics = mode == "train"
    assert changed == {
        "weight": True,
        "bias": True,
        "running_mean": statistics,
        "running_var": statistics,
        "num_batches_tracked": statistics,
    }
    assert int(packed["1.num_batches_tracked"].parts["values"]) == (8 if statistics else 0)


@pytest.mark.parametrize(
    "method", [METHOD, fp.Scalar(4), fp.Keep(), fp.QSPCA(6, 3, tile=16), fp.methods.VQ(16)]
)
def test_every_kind_learns(method: Any) -> None:
    before = fp.compress(perceptron(), method)
    after = tune(method=method)
    assert error(after, *points()) < error(before, *points())
    assert [after[name].kind for name in after] == [before[name].kind for name in before]


def test_mixed_precision() -> None:
    """bfloat16 on a CPU; and runs of both precisions in one process."""
    plain = tune()
    mixed = tune(on_all(epochs=2, learning_rate=1e-2, mixed_precision="bf16"))
    assert error(mixed, *points()) < error(fp.compress(perceptron(), METHOD), *points())
    assert differs(mixed, plain)
    assert_same_packed(tune(), plain)


def test_half_precision_on_a_cpu_is_full_precision() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert_same_packed(tune(on_all(epochs=2, learning_rate=1e-2, mixed_precision="fp16")), tune())


IMPOSSIBLE: list[dict[str, Any]] = [
    {"epochs": 0},
    {"epochs": 1.5},
    {"epochs": "5"},
    {"learning_rate": 0.0},
    {"learning_rate": "fast"},
    {"learning_rate": math.nan},
    {"final_share": 1.5},
    {"weight_decay": -0.1},
    {"batch_norm": "thaw"},
    {"teacher_share": 2.0},
    {"temperature": 0.0},
    {"mixed_precision": "fp4"},
    {"seed": "today"},
]


@pytest.mark.parametrize("settings", IMPOSSIBLE, ids=str)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(fp.PlanError, match=next(iter(settings))):
        fp.Schedule(**settings)


# -- data that is wrong ------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*points(), strict=True))


class Short(list[Any]):
    """Says it has more than it gives."""

    def __len__(self) -> int:
        return 6


BATCHES = list(zip(points()[0].split(8), points()[1].split(8), strict=True))


def test_batches_from_a_list() -> None:
    assert_same_packed(tune(batches=BATCHES), tune())


@pytest.mark.parametrize("batches", [iter(BATCHES), DataLoader(Endless(), batch_size=8)])
def test_data_without_a_length(batches: Any) -> None:
    with pytest.raises(fp.SourceError, match="the training data has no length"):
        tune(batches=batches)


@pytest.mark.parametrize("batches", [[], DataLoader(range(3), batch_size=8, drop_last=True)])  # type: ignore[arg-type]
def test_no_data(batches: Any) -> None:
    with pytest.raises(fp.SourceError, match="the training data has no batches"):
        tune(batches=batches)


def test_data_that_ends_early(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run"
    with pytest.raises(fp.SourceError, match="ended after 4 of 6 batches in epoch 1"):
        tune(batches=Short(BATCHES), checkpoint=checkpoint, checkpoint_every=3)
    assert state_in(checkpoint)["done"] == 3


@pytest.mark.parametrize("batch", [points()[0], (points()[0],), {"x": 1}, "text", (points()[0], ["a"])])
def test_batches_of_another_form(batch: Any) -> None:
    with pytest.raises(fp.SourceError, match=r"a training batch is a \w+, expected \(inputs, labels\)"):
        tune(batches=[batch])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("bad", "every", "kept"), [(3, 2, 2), (2, 1, 2), (3, 3, 3), (1, 4, None)])
def test_data_that_are_no_numbers(
    tmp_path: Path, value: float, bad: int, every: int, kept: int | None
) -> None:
    """Found out before anything is saved that could not be undone: the last checkpoint is a good one."""
    inputs = points()[0].clone()
    inputs[bad * 8] = value
    spoilt = list(zip(inputs.split(8), points()[1].split(8), strict=True))
    checkpoint = tmp_path / "run"
    settings: dict[str, Any] = {"checkpoint": checkpoint, "checkpoint_every": every}
    with pytest.raises(
        fp.SourceError, match=r"the loss is (nan|inf) at step \d: lower the learning rate, or"
    ):
        tune(batches=spoilt, **settings)
    assert checkpoint.exists() == (kept is not None)
    if kept is not None:
        state = state_in(checkpoint)
        assert state["done"] == kept
        assert all(each.isfinite().all() for each in state["model"].values())
    assert_same_packed(tune(batches=BATCHES, **settings), tune(batches=BATCHES))


def test_a_model_that_is_not_the_packed_one() -> None:
    with pytest.raises(fp.SourceError, match="the model lacks"):
        fp.finetune(fp.compress(perceptron(), METHOD), nn.Linear(2, 2), loader())


# -- checkpoints -------------------------------------------------------------------------------------


def test_killed_at_random_it_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """Dropout, batch norm, augmentation and shuffling from every generator there may be."""
    command = [sys.executable, "-m", "tests.tune.killed_tuner", str(tmp_path), "0"]
    done = run_forked(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    same = json.loads(done.stdout)
    assert len(same) == 12
    assert [run for run, equal in same.items() if not equal] == []


def test_a_finished_run_started_again_is_only_read(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run"
    first = tune(checkpoint=checkpoint)
    stored = checkpoint.read_bytes()

    def never(*_: Tensor) -> Tensor:
        raise AssertionError

    assert_same_packed(tune(checkpoint=checkpoint, loss=never), first)
    assert checkpoint.read_bytes() == stored


def test_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    net = perceptron(norm=True, drop=0.3)
    settings: dict[str, Any] = {
        "batches": loader(shuffle=True),
        "checkpoint": tmp_path / "run",
        "checkpoint_every": 1,
    }
    plain = tune(net=perceptron(norm=True, drop=0.3), batches=loader(shuffle=True))
    assert_same_packed(tune(net=net, **settings), plain)


def test_every_generator_comes_back() -> None:
    import random

    import numpy as np

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss(0, 1)  # noqa: NPY002

    np.random.standard_normal()  # noqa: NPY002, leaves a second Gaussian number behind
    state = random_state()
    first = draw()
    assert draw() != first
    restore_random_state(state)
    assert draw() == first


UNLIKE: dict[str, dict[str, Any]] = {
    "other settings": {"schedule": on_all(epochs=2, learning_rate=1e-3)},
    "more epochs": {"schedule": on_all(epochs=3, learning_rate=1e-2)},
    "other bits": {"method": fp.QSPCA(6, 3, 0.1, tile=16)},
    "other rank": {"method": fp.QSPCA(5, 4, 0.1, tile=16)},
    "no mask": {"method": fp.QSPCA(6, 4, tile=16)},
    "other sparsity": {"method": fp.QSPCA(6, 4, 0.2, tile=16)},
    "no mean": {"method": fp.QSPCA(6, 4, 0.1, tile=16, center=False)},
    "other scales": {"method": fp.QSPCA(6, 4, 0.1, tile=16, latent_scales="column")},
    "other weights": {"net": with_weights(perceptron(), seed=50)},
    "other model": {"net": perceptron(norm=True)},
    "more data": {"batches": loader(40)},
    "a teacher": {"teacher": perceptron()},
}


@pytest.mark.parametrize("case", UNLIKE)
def test_a_checkpoint_of_another_run(tmp_path: Path, case: str) -> None:
    checkpoint = tmp_path / "run"
    tune(checkpoint=checkpoint)
    stored = checkpoint.read_bytes()
    with pytest.raises(
        fp.SourceError, match=r"run belongs to another run .* remove it to start over"
    ) as caught:
        tune(checkpoint=checkpoint, **UNLIKE[case])
    assert str(checkpoint) in str(caught.value)
    assert checkpoint.read_bytes() == stored


class Dangerous:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def other_files(tmp_path: Path) -> dict[str, bytes]:
    tune(checkpoint=tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    torch.save({"weights": torch.zeros(3)}, tmp_path / "weights")
    torch.save(torch.zeros(3), tmp_path / "tensor")
    return {
        "empty": b"",
        "garbage": b"\x00\xff" * 5000,
        "text": b"precious notes",
        "cut in its first words": whole[:20],
        "weights": (tmp_path / "weights").read_bytes(),
        "a tensor": (tmp_path / "tensor").read_bytes(),
        "code": pickle.dumps(Dangerous()),
    }


def test_a_file_that_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, it is not run, and it is still there."""
    monkeypatch.chdir(tmp_path)
    for name, stored in other_files(tmp_path).items():
        checkpoint = tmp_path / "run"
        checkpoint.write_bytes(stored)
        with pytest.raises(fp.SourceError, match="run is not a checkpoint of a fine-tuning run") as caught:
            tune(checkpoint=checkpoint)
        assert str(checkpoint) in str(caught.value), name
        assert checkpoint.read_bytes() == stored, name
    assert not (tmp_path / "ran").exists()


def test_a_damaged_checkpoint_of_this_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run"
    tune(checkpoint=checkpoint)
    fingerprint = state_in(checkpoint)["fingerprint"]
    torch.save({"fingerprint": fingerprint}, checkpoint)
    with pytest.raises(fp.SourceError, match="run is not a checkpoint of a fine-tuning run"):
        tune(checkpoint=checkpoint)
    write_checked(checkpoint, checkpoint.read_bytes())
    with pytest.raises(fp.SourceError, match="run is not a checkpoint of a fine-tuning run: it holds"):
        tune(checkpoint=checkpoint)


def test_a_checkpoint_that_was_cut_or_flipped_is_made_again(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run"
    expected = tune(checkpoint=checkpoint, checkpoint_every=3)
    whole = checkpoint.read_bytes()
    for harmed in (whole[: len(whole) // 2], whole[:90], flipped(whole, 3 * len(whole))):
        checkpoint.write_bytes(harmed)
        with pytest.warns(UserWarning, match="run is damaged, so the training so far is made again"):
            found = tune(checkpoint=checkpoint, checkpoint_every=3)
        assert_same_packed(found, expected)
        assert checkpoint.read_bytes() == whole


def test_a_checkpoint_is_of_its_teacher_and_of_its_file(tmp_path: Path) -> None:
    """Not only of their shapes."""
    checkpoint = tmp_path / "run"
    tune(checkpoint=checkpoint, teacher=perceptron())
    with pytest.raises(fp.SourceError, match="belongs to another run"):
        tune(checkpoint=checkpoint, teacher=with_weights(perceptron(), seed=50))
    for number, seed in enumerate((0, 50)):
        net = perceptron()
        with torch.no_grad():
            next(net.parameters()).copy_(next(with_weights(perceptron(), seed).parameters()))
        fp.save(fp.compress(net, METHOD, progress=False), tmp_path / f"{number}.safetensors")
    settings: dict[str, Any] = {"schedule": FAST, "checkpoint": tmp_path / "other", "progress": False}
    fp.finetune(fp.load(tmp_path / "0.safetensors"), perceptron(), loader(), **settings)
    fp.finetune(fp.load(tmp_path / "0.safetensors"), perceptron(), loader(), **settings)
    with pytest.raises(fp.SourceError, match="belongs to another run"):
        fp.finetune(fp.load(tmp_path / "1.safetensors"), perceptron(), loader(), **settings)


def test_nowhere_to_save(tmp_path: Path) -> None:
    """Said before the first step, not after hours."""
    steps: list[int] = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        steps.append(1)
        return cross_entropy(logits, labels)

    with pytest.raises(fp.SourceError, match="there is no folder"):
        tune(checkpoint=tmp_path / "missing" / "run", loss=loss)
    with pytest.raises(fp.PlanError, match="checkpoint_every is 0, expected at least 1"):
        tune(checkpoint=tmp_path / "run", checkpoint_every=0, loss=loss)
    assert steps == []


# -- processes ---------------------------------------------------------------------------------------


def test_two_processes_reach_what_one_reaches(tmp_path: Path) -> None:
    """The halves' gradients add up to the whole's but for their rounding, which moves no code."""
    write_images(tmp_path / "data", 4)
    fp.save(fp.compress(build(), METHOD), tmp_path / "packed")
    done = run_forked(
        [sys.executable, "-m", "tests.tune.two_processes", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == str(tmp_path / "command")  # said once, by one of them
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert "command" in content
    assert content["plain.0"] == content["plain.1"]
    assert content["steered.0"] == content["steered.1"]
    assert len(content["steered.0"]) <= fp.load(tmp_path / "plain.0").size().original_bytes / 2.5
    assert content["shuffled.0"] == content["shuffled.1"] == content["resumed.0"] == content["resumed.1"]
    assert "broken.0" not in content
    tuned(tmp_path / "one", shuffle=False)
    one, two = fp.load(tmp_path / "one"), fp.load(tmp_path / "plain.0")
    for name, encoded in one.items():
        for part, values in encoded.parts.items():
            found = two[name].parts[part]
            if part in encoded.bits:
                assert_same_tensor(found, values)
            else:
                # A number moves by its rate a step, and a sum of 8 samples rounds a few times.
                assert_close(found, values)
    with pytest.raises(fp.SourceError, match="belongs to another run"):
        tuned(tmp_path / "one", shuffle=True, checkpoint=tmp_path / "checkpoint", checkpoint_every=3)
    state = load_checkpoint(tmp_path / "checkpoint", state_in(tmp_path / "checkpoint")["fingerprint"])
    assert state is not None
    assert state["done"] == 8
