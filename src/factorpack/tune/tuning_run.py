"""A run of end-to-end fine-tuning: steps, epochs, measurements, checkpoints."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from factorpack.batches import batch_size
from factorpack.errors import PlanError, SourceError
from factorpack.format.packed_file import file_bytes
from factorpack.packed import Packed
from factorpack.progress import Progress, Showing
from factorpack.solve.moments import NORMS
from factorpack.tune.best import Best, Tuned, as_state, from_state
from factorpack.tune.checkpoint import (
    fingerprint_of,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from factorpack.tune.meter import Meter, NotFiniteError
from factorpack.tune.objective import Objective
from factorpack.tune.packed_model import PackedModel
from factorpack.tune.planned_start import plan_start
from factorpack.tune.processes import compute_once, open_accelerator
from factorpack.tune.schedule import Schedule
from factorpack.tune.steer import Finish, Steering, budget_for, finish_packed
from factorpack.tune.training_data import TrainingData, generators_of, length_of, pair_of

_READ_EVERY = 20


class Run:
    """A packed model in training: its start, its state, and the best state on held-out inputs."""

    def __init__(
        self,
        packed: Packed,
        model: nn.Module,
        data: TrainingData,
        objective: Objective,
        schedule: Schedule,
        finish: Finish | None,
        checkpoint: Path | None,
    ) -> None:
        self.objective, self.finish, self.held_out = objective, finish, data.held_out
        self.steps_per_epoch = length_of(data.batches)
        self.steps = schedule.epochs * self.steps_per_epoch
        self.accelerator = open_accelerator(schedule.mixed_precision)
        self.checkpoint = checkpoint
        self.fingerprint = self._fingerprint(packed, schedule)
        self.state = None
        if checkpoint is not None and checkpoint.exists():
            self.state = load_checkpoint(checkpoint, self.fingerprint)
        if objective.teacher is not None:
            objective.teacher.to(self.accelerator.device)
        self.plan = self._plan(packed, model, data.calibration, schedule)
        # A plan folds norms, which leaves no statistics to train; moving its codes has not helped.
        if self.plan is not None:
            schedule = replace(schedule, batch_norm="frozen", codes="frozen")
        self.schedule = schedule
        self._prepare(packed if self.plan is None else from_state(self.plan), model, data.batches)

    def _fingerprint(self, packed: Packed, schedule: Schedule) -> str:
        present = (self.objective.teacher is not None, self.finish is not None)
        inputs = sum(batch_size(batch) for batch in self.held_out)
        settings = (sorted(asdict(schedule).items()), self.steps_per_epoch, inputs, present)
        return fingerprint_of(packed, self.objective.teacher, *settings, self.accelerator.num_processes)

    def _plan(
        self, packed: Packed, model: nn.Module, calibration: Iterable[Any], schedule: Schedule
    ) -> dict[str, Any] | None:
        """The plan that is trained, where the given file is larger than the target."""
        if self.state is not None:
            kept: dict[str, Any] | None = self.state["start"]
            return kept
        if not schedule.target_ratio or schedule.shrink_by == "training":
            return None
        budget = int(packed.size().original_bytes / schedule.target_ratio)
        finished = finish_packed(dict(packed), packed.aliases, self.finish)
        if file_bytes(finished, finished.aliases) <= budget:
            return None
        if not self.held_out:
            raise SourceError(
                "nothing can be held out of this training data, so nothing would tell whether training from the "
                "plan helps: give held_out batches, or a list or a loader with more inputs"
            )
        device = self.accelerator.device
        teacher = self.objective.teacher
        return compute_once(
            lambda: as_state(plan_start(packed, model.to(device), teacher, calibration, budget))
        )

    def _prepare(self, packed: Packed, model: nn.Module, batches: Iterable[Any]) -> None:
        schedule = self.schedule
        _check_norms(packed, schedule)
        torch.manual_seed(schedule.seed)
        self.packed = Packed(dict(packed), packed.aliases)
        # What is measured is what a file would load, in a model that is not being trained.
        self.measured = copy.deepcopy(model).to(self.accelerator.device) if self.held_out else None
        tuned = PackedModel(packed, model, frozen=schedule.codes == "frozen")
        optimizer = _make_optimizer(tuned, schedule)
        self.tuned_model, self.optimizer = self.accelerator.prepare(tuned, optimizer)
        shared = self.accelerator.num_processes > 1 and isinstance(batches, DataLoader)
        # With one process the loader is used directly: accelerate's prefetches a batch, which a resumed run
        # could not reproduce.
        self.batches = self.accelerator.prepare(batches) if shared else batches
        self.generators = generators_of(batches)
        self.epoch_random: dict[str, Any] | None = None
        self.step_random: dict[str, Any] | None = None
        self.best: Best | None = None
        self.budget = budget_for(self.packed, schedule.target_ratio, self.finish)
        steers = (schedule.rate or schedule.target_ratio) and schedule.codes == "trained"
        self.steering = self._make_steering() if steers else None

    def _make_steering(self) -> Steering:
        holds = not self.schedule.trains_for_size
        settings = (self.schedule, self.steps, self.budget, self._measure_bytes, self._adam_curvature)
        return Steering(self.unwrapped(), *settings, holds)

    def _measure_bytes(self) -> int:
        packed = self.result()
        return file_bytes(packed, packed.aliases)

    def result(self) -> Packed:
        """The packed model as it would be saved now."""
        return finish_packed(self.unwrapped().encoded(self.packed), self.packed.aliases, self.finish)

    def start(self) -> Packed:
        return finish_packed(dict(self.packed), self.packed.aliases, self.finish)

    def unwrapped(self) -> PackedModel:
        model: PackedModel = self.accelerator.unwrap_model(self.tuned_model)
        return model

    def train(self, every: int, progress: Showing) -> Packed:
        """Trains what is left of the run, and returns what is to be saved."""
        done = self._resume()
        if self.held_out and self.best is None:
            self.best = Best(self._measure(self.start()))
        if self.checkpoint is not None and self.plan is not None and done == 0:
            self._save(self.checkpoint, 0)  # a plan takes minutes
        try:
            self._train_epochs(done, every, progress if self.accelerator.is_main_process else False)
        except NotFiniteError as error:
            if self.best is None or self.accelerator.num_processes > 1:
                raise
            warnings.warn(f"{error}; training ended there", stacklevel=3)
        if self.best is not None:
            return self.best.packed or self.start()
        if self.steering is not None:
            self.steering.close()
        return self.result()

    def _train_epochs(self, done: int, every: int, shown: Showing) -> None:
        # Checks for NaN before codes are counted and saved.
        read_every = self.steering.every if self.steering is not None else _READ_EVERY
        meter = Meter()
        with Progress("fine-tuning", self.steps, shown) as bar:
            bar.advance("", done)
            for epoch in range(done // self.steps_per_epoch, self.schedule.epochs):
                if self._is_stale():
                    return
                self._set_modes()
                for batch in self._epoch(epoch, done):
                    meter.add(*self._step(batch, done))
                    done += 1
                    ends = done % self.steps_per_epoch == 0
                    saving = done % every == 0 or done == self.steps
                    if saving or ends or done % read_every == 0:
                        meter.read(done)
                    if ends:
                        self._measure_epoch(epoch + 1)
                    best = "" if self.best is None else f", held out {self.best.loss:.4g} at best"
                    bar.advance(f"epoch {epoch + 1}/{self.schedule.epochs}, {meter}{best}", 1)
                    if self.checkpoint is not None and (saving or self._is_stale()):
                        self._save(self.checkpoint, done)

    def _is_stale(self) -> bool:
        return self.best is not None and self.best.is_stale(self.schedule.patience)

    def _measure_epoch(self, epoch: int) -> None:
        """Measures the state after an epoch, where it is within its size."""
        if self.best is None:
            return
        if self.steering is not None:
            fits = self.steering.fit()
        else:
            fits = not self.budget or self._measure_bytes() <= self.budget
        found = self.result()
        self.best.offer(epoch, self._measure(found) if fits else math.inf, found)

    def _measure(self, packed: Packed) -> float:
        assert self.measured is not None
        model = self.measured
        return compute_once(lambda: self.objective.measure(packed.load_into(model), self.held_out))

    def tuned(self) -> Tuned | None:
        if self.best is None:
            return None
        best, objective = self.best, self.objective
        inputs = sum(batch_size(batch) for batch in self.held_out)
        return Tuned(inputs, not objective.needs_labels, best.start, best.loss, best.epoch, best.measured)

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
        inputs, labels = pair_of(batch, self.accelerator.device, self.objective.needs_labels)
        if self.steering is not None:
            self.steering.before_step(done)
        for group in self.optimizer.param_groups:
            group["lr"] = group["first_lr"] * self.schedule.decay(done, self.steps)
        with self.accelerator.autocast():
            logits = self.tuned_model(inputs)
            loss = self.objective(logits, inputs, labels)
        total = loss if self.steering is None else loss + self.steering.loss()
        self.optimizer.zero_grad()
        self.accelerator.backward(total)
        self.optimizer.step()
        return loss.detach(), _hits(logits.detach(), labels)

    def _adam_curvature(self, parameter: Tensor) -> Tensor | None:
        moments: Tensor | None = self.optimizer.state.get(parameter, {}).get("exp_avg_sq")
        return moments

    def _set_modes(self) -> None:
        self.tuned_model.train()
        if self.schedule.batch_norm == "frozen":
            for module in self.tuned_model.modules():
                if isinstance(module, NORMS):
                    module.eval()

    def _resume(self) -> int:
        """Restores the state of an interrupted run; returns its number of steps done."""
        state, self.state = self.state, None
        if state is None:
            return 0
        self.unwrapped().load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.steering is not None:
            self.steering.load(state["steering"])
        self.best = None if state["best"] is None else Best.load(state["best"])
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
            state |= {"start": self.plan, "best": None if self.best is None else self.best.state()}
            save_checkpoint(checkpoint, state)

    def _random_state(self) -> dict[str, Any]:
        return random_state() | {"generators": [each.get_state() for each in self.generators]}

    def _restore_random_state(self, state: dict[str, Any]) -> None:
        restore_random_state(state)
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)


def _make_optimizer(model: PackedModel, schedule: Schedule) -> torch.optim.Adam:
    """Adam; where codes are frozen, with rates relative to the size of what they move."""
    rate = schedule.learning_rate
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "first_lr": rate}]
    if schedule.codes == "frozen":
        groups = [{"params": [each], "first_lr": unit * rate} for each, unit in model.relative_units()]
    return torch.optim.Adam(groups, lr=rate, weight_decay=schedule.weight_decay)


def _hits(logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """The share of correct classes; None where the labels are not classes."""
    if labels is None or logits.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
        return None
    return (logits.argmax(-1) == labels).float().mean()


def _check_norms(packed: Packed, schedule: Schedule) -> None:
    folded = [name for name in packed if name.endswith("running_var") and packed[name].kind == "constant"]
    if folded and schedule.batch_norm == "train":
        raise PlanError(
            f"{folded[0]!r} is a constant: folded batch norms have no statistics to train, "
            "they need batch_norm='frozen'"
        )
