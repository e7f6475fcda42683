"""End-to-end fine-tuning of a packed model with accelerate: one or more processes, CPU or GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from factorpack.budget.norms import NORMS
from factorpack.errors import PlanError, SourceError
from factorpack.format.packed_file import file_bytes
from factorpack.packed import Packed
from factorpack.progress import Progress
from factorpack.tune.checkpoint import (
    fingerprint_of,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from factorpack.tune.meter import Meter
from factorpack.tune.packed_model import PackedModel
from factorpack.tune.schedule import Schedule as Schedule
from factorpack.tune.steer import Finish, Steering, budget_for, finish_packed
from factorpack.tune.training_data import generators_of, length_of, pair_of

Loss = Callable[[Tensor, Tensor], Tensor]
_READ_EVERY = 20


def finetune(
    packed: Packed,
    model: nn.Module,
    train_batches: Iterable[Any],
    *,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    schedule: Schedule | None = None,
    finish: Finish | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 500,
    progress: bool = True,
) -> Packed:
    """Trains a packed model in its packed form; `packed` then holds the result, ready to save.

    `train_batches` yields (inputs, labels), once per epoch: a DataLoader, or any iterable with a length.
    Rounding is straight-through, scales are learned, and zeros made by a threshold stay zero. With a
    `teacher` (such as the original model) the loss is the divergence from its outputs; `loss` is for the
    labels, cross-entropy by default. With `checkpoint` the state is saved every `checkpoint_every` steps,
    and a killed run resumes from it: on a CPU it ends in the same bytes. `accelerate launch` and torchrun
    distribute the same call over processes.

    `schedule.rate` and `schedule.target_ratio` train for size too. `finish` is the last step applied to the
    trained model (such as folding its batch norms): its return value is the result, and is what is measured.
    Rows of a latent that became zero are removed.
    """
    run = _Run(packed, model, train_batches, teacher, loss, schedule or Schedule(), finish)
    run.train(Path(checkpoint) if checkpoint is not None else None, checkpoint_every, progress)
    packed.replace(dict(run.result()))
    return packed


def is_main_process() -> bool:
    """Whether this is the main process of a run: all have the result, one should write it."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


class _Run:
    def __init__(
        self,
        packed: Packed,
        model: nn.Module,
        batches: Iterable[Any],
        teacher: nn.Module | None,
        loss: Loss | None,
        schedule: Schedule,
        finish: Finish | None,
    ) -> None:
        _check_norms(packed, schedule)
        self.steps_per_epoch = length_of(batches)
        self.schedule = schedule
        self.loss: Loss = loss or nn.functional.cross_entropy
        self.accelerator = _accelerator(schedule.mixed_precision)
        torch.manual_seed(schedule.seed)
        # The teacher is often the same object as the trained model: its outputs must not change.
        self.teacher = None if teacher is None else copy.deepcopy(teacher).eval().requires_grad_(False)
        tuned = PackedModel(packed, model)
        trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
        self.tuned, self.optimizer = self.accelerator.prepare(tuned, optimizer)
        if self.teacher is not None:
            self.teacher.to(self.accelerator.device)
        self.steps = schedule.epochs * self.steps_per_epoch
        present = (teacher is not None, finish is not None)
        settings = (sorted(asdict(schedule).items()), self.steps_per_epoch, present)
        self.fingerprint = fingerprint_of(packed, teacher, *settings, self.accelerator.num_processes)
        shared = self.accelerator.num_processes > 1 and isinstance(batches, DataLoader)
        # With one process the loader is used directly: accelerate's prefetches a batch, which a resumed run
        # could not reproduce.
        self.batches = self.accelerator.prepare(batches) if shared else batches
        self.generators = generators_of(batches)
        self.epoch_random: dict[str, Any] | None = None
        self.step_random: dict[str, Any] | None = None
        self.packed, self.finish = Packed(dict(packed), packed.aliases), finish
        self.steering = self._make_steering() if schedule.rate or schedule.target_ratio else None

    def _make_steering(self) -> Steering:
        budget = budget_for(self.packed, self.schedule.target_ratio, self.finish)

        def measure() -> int:
            packed = self.result()
            return file_bytes(packed, packed.aliases)

        return Steering(
            self.unwrapped(), self.schedule, self.steps, budget, measure, curvature=self._adam_curvature
        )

    def result(self) -> Packed:
        """The packed model as it would be saved now."""
        return finish_packed(self.unwrapped().encoded(self.packed), self.packed.aliases, self.finish)

    def unwrapped(self) -> PackedModel:
        model: PackedModel = self.accelerator.unwrap_model(self.tuned)
        return model

    def train(self, checkpoint: Path | None, every: int, progress: bool) -> None:
        if every < 1:
            raise PlanError(f"checkpoint_every is {every}, expected at least 1")
        if checkpoint is not None and not checkpoint.parent.is_dir():
            raise SourceError(f"there is no folder {checkpoint.parent} for the checkpoint")
        done = self._resume(checkpoint)
        # Checks for NaN before codes are counted and saved.
        read_every = self.steering.every if self.steering is not None else _READ_EVERY
        meter = Meter()
        shown = progress and self.accelerator.is_main_process
        with Progress("fine-tuning", self.steps, shown, unit="steps") as bar:
            bar.advance("", done)
            for epoch in range(done // self.steps_per_epoch, self.schedule.epochs):
                self._set_modes()
                for batch in self._epoch(epoch, done):
                    meter.add(*self._step(batch, done))
                    done += 1
                    saving = checkpoint is not None and (done % every == 0 or done == self.steps)
                    if saving or done % read_every == 0 or done == self.steps:
                        meter.read(done)
                    bar.advance(f"epoch {epoch + 1}/{self.schedule.epochs}, {meter}", 1)
                    if checkpoint is not None and saving:
                        self._save(checkpoint, done)
        if self.steering is not None:
            self.steering.close()

    def _epoch(self, epoch: int, done: int) -> Iterator[Any]:
        """The remaining batches of an epoch, in the same order as in an uninterrupted run."""
        position = done - epoch * self.steps_per_epoch
        if position == 0:
            self.epoch_random, self.step_random = self._random_state(), None
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)
        drawn = iter(self.batches)
        for number in range(self.steps_per_epoch):
            if number == position and self.step_random is not None:
                self._restore_random_state(self.step_random)
            batch = next(drawn, None)
            if batch is None:
                raise SourceError(
                    f"the training data ended after {number} of {self.steps_per_epoch} batches "
                    f"in epoch {epoch + 1}"
                )
            if number >= position:
                yield batch

    def _step(self, batch: Any, done: int) -> tuple[Tensor, Tensor | None]:
        """One step. Loss and accuracy stay on the device: reading them would wait for it."""
        inputs, labels = pair_of(batch, self.accelerator.device)
        if self.steering is not None:
            self.steering.before_step(done)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate * self.schedule.decay(done, self.steps)
        with self.accelerator.autocast():
            logits = self.tuned(inputs)
            loss = self._loss(logits, inputs, labels)
        total = loss if self.steering is None else loss + self.steering.loss()
        self.optimizer.zero_grad()
        self.accelerator.backward(total)
        self.optimizer.step()
        are_classes = logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point()
        hits = (logits.detach().argmax(-1) == labels).float().mean() if are_classes else None
        return loss.detach(), hits

    def _loss(self, logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        share = self.schedule.teacher_share if self.teacher is not None else 0.0
        total = logits.new_zeros(())
        if share > 0 and self.teacher is not None:
            with torch.no_grad():
                teacher_logits = self.teacher(inputs)
            total = total + share * distillation(logits, teacher_logits, self.schedule.temperature)
        if share < 1:
            total = total + (1 - share) * self.loss(logits, labels)
        return total

    def _adam_curvature(self, parameter: Tensor) -> Tensor | None:
        moments: Tensor | None = self.optimizer.state.get(parameter, {}).get("exp_avg_sq")
        return moments

    def _set_modes(self) -> None:
        self.tuned.train()
        if self.schedule.batch_norm == "frozen":
            for module in self.tuned.modules():
                if isinstance(module, NORMS):
                    module.eval()

    def _resume(self, checkpoint: Path | None) -> int:
        """Restores the state of an interrupted run; returns its number of steps done."""
        if checkpoint is None or not checkpoint.exists():
            return 0
        state = load_checkpoint(checkpoint, self.fingerprint)
        if state is None:
            return 0
        self.unwrapped().load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.steering is not None:
            self.steering.load(state["steering"])
        rank = self.accelerator.process_index
        self.epoch_random, self.step_random = state["epoch_random"][rank], state["step_random"][rank]
        # The epoch's order was drawn from this state: it is drawn again, then finished batches are skipped.
        self._restore_random_state(self.epoch_random)
        return int(state["done"])

    def _save(self, checkpoint: Path, done: int) -> None:
        from accelerate.utils import gather_object

        now = self._random_state()
        epoch_random = now if done % self.steps_per_epoch == 0 else self.epoch_random
        state = {"epoch_random": gather_object([epoch_random]), "step_random": gather_object([now])}
        if self.accelerator.is_main_process:
            state |= {"fingerprint": self.fingerprint, "done": done}
            state |= {"model": self.unwrapped().state_dict(), "optimizer": self.optimizer.state_dict()}
            state["steering"] = None if self.steering is None else self.steering.state()
            save_checkpoint(checkpoint, state)

    def _random_state(self) -> dict[str, Any]:
        return random_state() | {"generators": [each.get_state() for each in self.generators]}

    def _restore_random_state(self, state: dict[str, Any]) -> None:
        restore_random_state(state)
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)


def distillation(logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(teacher || student) of softened outputs, mean over samples."""
    student = (logits / temperature).log_softmax(-1)
    target = (teacher_logits / temperature).log_softmax(-1)
    divergence = nn.functional.kl_div(student, target, log_target=True, reduction="none").sum(-1).mean()
    return temperature**2 * divergence


def _accelerator(precision: str) -> Any:
    try:
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise SourceError("fine-tuning needs accelerate: pip install 'factorpack[train]'") from error
    # accelerate keeps the precision of a process's first run, and refuses another one later.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()
    # Split batches, so that a step has the same number of samples for any number of processes.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    return Accelerator(mixed_precision=precision, dataloader_config=loading)


def _check_norms(packed: Packed, schedule: Schedule) -> None:
    folded = [name for name in packed if name.endswith("running_var") and packed[name].kind == "constant"]
    if folded and schedule.batch_norm == "train":
        raise PlanError(
            f"{folded[0]!r} is a constant: folded batch norms have no statistics to train, "
            "they need batch_norm='frozen'"
        )
