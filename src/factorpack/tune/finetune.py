"""End-to-end fine-tuning of a packed model, through accelerate: one process or many, CPU or GPU."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from factorpack.errors import PlanError, SourceError
from factorpack.methods.protocol import check_type
from factorpack.model import Packed
from factorpack.progress import Progress
from factorpack.tune.checkpoint import load_checkpoint, random_state, restore_random_state, save_checkpoint
from factorpack.tune.packed_model import PackedModel

Loss = Callable[[Tensor, Tensor], Tensor]
_NORMS = nn.modules.batchnorm._BatchNorm
_LOOK_EVERY = 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast: the paper's cosine decay to 1e-3 of the first rate, without weight decay."""

    epochs: int = 5
    learning_rate: float = 3e-4
    final_share: float = 1e-3
    weight_decay: float = 0.0
    batch_norm: Literal["train", "frozen"] = "train"
    """"train" uses and updates batch statistics; "frozen" keeps the running ones, right for few images."""
    teacher_share: float = 1.0
    """With a teacher: the share of the loss that is distillation; the rest is the loss on the labels."""
    temperature: float = 1.0
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "seed"):
            check_type(name, getattr(self, name), int)
        for name in ("learning_rate", "final_share", "weight_decay", "teacher_share", "temperature"):
            check_type(name, getattr(self, name), float, int)
        if self.epochs < 1 or not self.learning_rate > 0 or not 0 <= self.final_share <= 1:
            raise PlanError(
                f"epochs {self.epochs}, learning_rate {self.learning_rate}, final_share {self.final_share}: "
                "expected at least 1, above 0, and from 0 to 1"
            )
        if self.batch_norm not in ("train", "frozen"):
            raise PlanError(f"batch_norm is {self.batch_norm!r}, allowed are 'train' and 'frozen'")
        if not 0 <= self.teacher_share <= 1 or not self.temperature > 0 or not self.weight_decay >= 0:
            raise PlanError("teacher_share is from 0 to 1, temperature above 0, weight_decay not below 0")
        if self.mixed_precision not in ("no", "fp16", "bf16"):
            raise PlanError(
                f"mixed_precision is {self.mixed_precision!r}, allowed are 'no', 'fp16' and 'bf16'"
            )

    def rate(self, step: int, steps: int) -> float:
        """Share of the first rate at a step: half a cosine from 1 down to `final_share`."""
        fall = 0.5 * (1 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))
        return self.final_share + (1 - self.final_share) * fall


def finetune(
    packed: Packed,
    model: nn.Module,
    train_batches: Iterable[Any],
    *,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    schedule: Schedule | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 500,
    progress: bool = True,
) -> Packed:
    """Trains a packed model in its packed form; `packed` then holds the result, ready to save.

    `train_batches` gives (inputs, labels), anew for every epoch: a DataLoader, or any iterable with a
    length. Rounding is passed straight through, scales are learned, zeros that a threshold made stay.
    With a `teacher` (the original model, say) the loss is the divergence from its answers; `loss` is for
    the labels, cross-entropy by default. With `checkpoint` the state is saved every so many steps, and a
    run that was killed goes on from there: on a CPU it ends in the same bytes. `accelerate launch` and
    torchrun spread the same call over processes.
    """
    run = _Run(packed, model, train_batches, teacher, loss, schedule or Schedule())
    run.train(Path(checkpoint) if checkpoint is not None else None, checkpoint_every, progress)
    packed.replace(run.unwrapped().encoded(packed))
    return packed


def is_main_process() -> bool:
    """Whether this process speaks for a run: all have the result, one should write it."""
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
    ) -> None:
        self.steps_per_epoch = _length(batches)
        self.schedule = schedule
        self.loss: Loss = loss or nn.functional.cross_entropy
        self.accelerator = _accelerator(schedule.mixed_precision)
        torch.manual_seed(schedule.seed)
        # The teacher is often the very model that is trained: its answers must stay what they are.
        self.teacher = None if teacher is None else copy.deepcopy(teacher).eval().requires_grad_(False)
        tuned = PackedModel(packed, model)
        trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
        self.tuned, self.optimizer = self.accelerator.prepare(tuned, optimizer)
        if self.teacher is not None:
            self.teacher.to(self.accelerator.device)
        self.steps = schedule.epochs * self.steps_per_epoch
        settings = (sorted(asdict(schedule).items()), self.steps_per_epoch, teacher is not None)
        self.fingerprint = _fingerprint(packed, *settings, self.accelerator.num_processes)
        shared = self.accelerator.num_processes > 1 and isinstance(batches, DataLoader)
        # Alone, the loader is used as it is: accelerate's draws a batch ahead, which no resume could repeat.
        self.batches = self.accelerator.prepare(batches) if shared else batches
        self.generators = _generators(batches)
        self.epoch_random: dict[str, Any] | None = None
        self.step_random: dict[str, Any] | None = None

    def unwrapped(self) -> PackedModel:
        model: PackedModel = self.accelerator.unwrap_model(self.tuned)
        return model

    def train(self, checkpoint: Path | None, every: int, progress: bool) -> None:
        if every < 1:
            raise PlanError(f"checkpoint_every is {every}, expected at least 1")
        if checkpoint is not None and not checkpoint.parent.is_dir():
            raise SourceError(f"there is no folder {checkpoint.parent} to keep the run's state in")
        done = self._resume(checkpoint)
        meter = _Meter()
        shown = progress and self.accelerator.is_main_process
        with Progress("fine-tuning", self.steps, shown, unit="steps") as bar:
            bar.advance("", done)
            for epoch in range(done // self.steps_per_epoch, self.schedule.epochs):
                self._set_modes()
                for batch in self._epoch(epoch, done):
                    meter.add(*self._step(batch, done))
                    done += 1
                    saving = checkpoint is not None and (done % every == 0 or done == self.steps)
                    if saving or done % _LOOK_EVERY == 0 or done == self.steps:
                        meter.look(done)
                    bar.advance(f"epoch {epoch + 1}/{self.schedule.epochs}, {meter}", 1)
                    if checkpoint is not None and saving:
                        self._save(checkpoint, done)

    def _epoch(self, epoch: int, done: int) -> Iterator[Any]:
        """The batches of an epoch that are still to come, drawn as if none had been done before."""
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
        """One step. Loss and share of right answers stay on the device: reading them would wait for it."""
        inputs, labels = _pair(batch, self.accelerator.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate * self.schedule.rate(done, self.steps)
        with self.accelerator.autocast():
            logits = self.tuned(inputs)
            loss = self._loss(logits, inputs, labels)
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        self.optimizer.step()
        are_classes = logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point()
        hits = (logits.detach().argmax(-1) == labels).float().mean() if are_classes else None
        return loss.detach(), hits

    def _loss(self, logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        share = self.schedule.teacher_share if self.teacher is not None else 0.0
        total = logits.new_zeros(())
        if share > 0 and self.teacher is not None:
            with torch.no_grad():
                answers = self.teacher(inputs)
            total = total + share * distillation(logits, answers, self.schedule.temperature)
        if share < 1:
            total = total + (1 - share) * self.loss(logits, labels)
        return total

    def _set_modes(self) -> None:
        self.tuned.train()
        if self.schedule.batch_norm == "frozen":
            for module in self.tuned.modules():
                if isinstance(module, _NORMS):
                    module.eval()

    def _resume(self, checkpoint: Path | None) -> int:
        """Steps that were done before, with everything as it was then."""
        if checkpoint is None or not checkpoint.exists():
            return 0
        state = load_checkpoint(checkpoint, self.fingerprint)
        self.unwrapped().load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        rank = self.accelerator.process_index
        self.epoch_random, self.step_random = state["epoch_random"][rank], state["step_random"][rank]
        # The epoch's order was drawn from here: it is drawn again, then the batches done are passed over.
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
            save_checkpoint(checkpoint, state)

    def _random_state(self) -> dict[str, Any]:
        return random_state() | {"generators": [each.get_state() for each in self.generators]}

    def _restore_random_state(self, state: dict[str, Any]) -> None:
        restore_random_state(state)
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)


class _Meter:
    """Loss and accuracy since the last look. Looking waits for the device, so it is done seldom."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._hits: list[Tensor] = []
        self._text = ""

    def add(self, loss: Tensor, hits: Tensor | None) -> None:
        self._losses.append(loss)
        self._hits += [] if hits is None else [hits]

    def look(self, step: int) -> None:
        loss = torch.stack(self._losses).float().mean().item()
        if not math.isfinite(loss):
            raise SourceError(
                f"the loss is {loss} by step {step}: lower the learning rate, or look for NaN in the data"
            )
        accuracy = f", accuracy {torch.stack(self._hits).mean().item():.1%}" if self._hits else ""
        self._text = f"loss {loss:.4f}{accuracy}"
        self._losses, self._hits = [], []

    def __str__(self) -> str:
        return self._text


def distillation(logits: Tensor, answers: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(teacher || student) of softened answers, mean over samples."""
    student = (logits / temperature).log_softmax(-1)
    target = (answers / temperature).log_softmax(-1)
    divergence = nn.functional.kl_div(student, target, log_target=True, reduction="none").sum(-1).mean()
    return temperature**2 * divergence


def _accelerator(precision: str) -> Any:
    try:
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise SourceError("fine-tuning needs accelerate: pip install 'factorpack[train]'") from error
    # accelerate keeps the precision of a process's first run, and refuses a second one of another.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()
    # Split batches, so that 64 samples a step are 64 however many processes share them.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    return Accelerator(mixed_precision=precision, dataloader_config=loading)


def _length(batches: Iterable[Any]) -> int:
    try:
        length = len(batches)  # type: ignore[arg-type]
    except TypeError as error:  # a loader of an iterable dataset has a __len__ that fails
        raise SourceError(
            "the training data has no length, so no learning rate can be planned over it"
        ) from error
    if length == 0:
        raise SourceError("the training data has no batches")
    return length


def _pair(batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    is_pair = isinstance(batch, list | tuple) and len(batch) == 2
    if not is_pair or not all(isinstance(value, Tensor) for value in batch):
        raise SourceError(f"a training batch is a {type(batch).__name__}, expected (inputs, labels)")
    return batch[0].to(device), batch[1].to(device)


def _generators(batches: Iterable[Any]) -> list[torch.Generator]:
    """Generators of its own that a loader draws its order from."""
    places = [batches, *(getattr(batches, name, None) for name in ("sampler", "batch_sampler"))]
    places.append(getattr(places[-1], "sampler", None))
    found = [getattr(place, "generator", None) for place in places]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())


def _fingerprint(packed: Packed, *settings: object) -> str:
    """What must be the same for a checkpoint to be this run's.

    Of the weights only the kept ones count: a solver on a GPU need not find the same factors twice.
    """
    digest = hashlib.sha256(repr(settings).encode())
    for name, encoded in packed.items():
        parts = [(part, values.dtype, tuple(values.shape)) for part, values in encoded.parts.items()]
        told = (name, encoded.kind, encoded.shape, sorted(encoded.bits.items()), encoded.extra_zeros, parts)
        digest.update(repr(told).encode())
        if encoded.kind == "keep":
            digest.update(encoded.parts["values"].cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
