"""End-to-end fine-tuning of a packed model with accelerate: one or more processes, CPU or GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.errors import PlanError, SourceError
from factorpack.packed import Packed
from factorpack.progress import ProgressOption
from factorpack.tune.objective import Loss, Objective
from factorpack.tune.schedule import Schedule
from factorpack.tune.steer import Finish
from factorpack.tune.training_data import TrainingData
from factorpack.tune.tuning_run import Run


def finetune(
    packed: Packed,
    model: nn.Module,
    train_batches: Iterable[Any],
    *,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    schedule: Schedule | None = None,
    finish: Finish | None = None,
    held_out: Iterable[Any] | None = None,
    calibration: Iterable[Any] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 500,
    progress: ProgressOption = True,
) -> Packed:
    """Trains a packed model in its packed form; `packed` then holds the result, ready to save.

    `train_batches` yields (inputs, labels), once per epoch: a DataLoader, or any iterable with a length.
    Rounding is straight-through, scales are learned, and zeros made by a threshold stay zero. With a
    `teacher` (such as the original model) the loss is the divergence from its outputs, and batches may be
    inputs alone; `loss` is for the labels, cross-entropy by default. With `checkpoint` the state is saved
    every `checkpoint_every` steps, and a killed run resumes from it: on a CPU it ends in the same bytes.
    `accelerate launch` and torchrun distribute the same call over processes.

    An eighth of the inputs is held out, where `train_batches` is a loader or a list; else `held_out` gives
    batches to measure on. The result is the best state on them after any epoch, or the start, with a warning,
    where none was better. What was measured is in the result's `tuned`.

    With `schedule.target_ratio` a larger file is planned anew at that size, from the teacher where it is the
    original, and training starts from the plan. It is made on `calibration`, the training inputs by default.
    `schedule.shrink_by="training"` and `schedule.rate` train for size instead. `finish` is the last step
    applied to the trained model (such as folding its batch norms): its return value is the result, and is
    what is measured. Rows of a latent that became zero are removed.
    """
    schedule = schedule or Schedule()
    if checkpoint_every < 1:
        raise PlanError(f"checkpoint_every is {checkpoint_every}, expected at least 1")
    kept = Path(checkpoint) if checkpoint is not None else None
    if kept is not None and not kept.parent.is_dir():
        raise SourceError(f"there is no folder {kept.parent} for the checkpoint")
    objective = Objective(loss, teacher, schedule.teacher_share, schedule.temperature)
    data = TrainingData.split(train_batches, held_out, calibration, schedule)
    run = Run(packed, model, data, objective, schedule, finish, kept)
    found = run.train(checkpoint_every, progress)
    packed.replace(dict(found))
    packed.aliases, packed.tuned = dict(found.aliases), run.tuned()
    if packed.tuned is not None and not packed.tuned.epoch:
        warnings.warn(str(packed.tuned), stacklevel=2)
    return packed
