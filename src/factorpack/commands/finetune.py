"""`factorpack finetune`: `fp.finetune` in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from factorpack.commands.console import print_json, print_line
from factorpack.commands.image_data import ImageData, accuracy_text
from factorpack.commands.options import BatchSize, Data, ImageSize, Json, Model, Output, Workers
from factorpack.commands.shared_options import shows_bar
from factorpack.compression import compress
from factorpack.errors import PlanError
from factorpack.format.container import check_ending, check_target, is_packed
from factorpack.format.locks import locked
from factorpack.format.overwrite import check_output
from factorpack.methods.settings import build_settings
from factorpack.model_reference import import_model
from factorpack.packed import Packed, load, save
from factorpack.planning.families import DEFAULT_METHOD
from factorpack.planning.recipe import Recipe, read_recipe
from factorpack.tune.accuracy import Accuracy
from factorpack.tune.accuracy import evaluate as measure
from factorpack.tune.best import Tuned
from factorpack.tune.models import default_device, load_weights
from factorpack.tune.processes import is_main_process, require_accelerate
from factorpack.tune.schedule import Schedule
from factorpack.tune.training import finetune as tune


@dataclass(frozen=True, slots=True)
class FinetuneRequest:
    """What `finetune` is told."""

    source: Path
    model: str
    images: ImageData
    output: Path
    recipe: Path | None
    teacher: Path | None
    given: Mapping[str, Any]
    """Settings of the schedule that options state; they come before the recipe's."""
    checkpoint: Path
    checkpoint_every: int

    def check(self) -> None:
        """Refuses outputs that cannot be written or would replace an input, and to begin what could not go on."""
        require_accelerate()
        for target in (self.output, self.checkpoint):
            check_target(target)
            check_output(target, self.source, self.teacher, self.recipe, self.images.folder)
        check_output(self.output, self.checkpoint)
        check_ending(self.output)

    def run(self, progress: bool) -> Packed | None:
        """Trains and saves; None in the processes of a run that save nothing."""
        recipe = read_recipe(self.recipe, DEFAULT_METHOD) if self.recipe is not None else None
        self.check()
        settings = {**(recipe.finetune if recipe else {}), **self.given}
        schedule: Schedule = build_settings(Schedule, settings, "fine-tuning")
        net = import_model(self.model).to(default_device())
        images = self.images.training(0.0 if schedule.trains_for_size else schedule.held_out_share)
        teacher = None
        if self.teacher is not None:
            teacher = load_weights(import_model(self.model), self.teacher).to(default_device())
        torch.manual_seed(schedule.seed)
        packed = self._packed(recipe, net, images.batches)
        is_first = os.environ.get("RANK", "0") == "0"  # among the processes of one run
        with locked(self.checkpoint) if is_first else nullcontext():
            tune(
                packed,
                net,
                images.batches,
                teacher=teacher,
                schedule=schedule,
                held_out=images.held_out,
                calibration=images.calibration,
                checkpoint=self.checkpoint,
                checkpoint_every=self.checkpoint_every,
                progress=progress,
            )
            if not is_main_process():
                return None
            save(packed, self.output)
            self.checkpoint.unlink(missing_ok=True)
        return packed

    def _packed(self, recipe: Recipe | None, net: nn.Module, batches: Any) -> Packed:
        """The packed file itself, or a checkpoint compressed by the recipe, calibrated on training images."""
        if is_packed(self.source):
            return load(self.source)
        if recipe is None:
            raise PlanError(f"{self.source} is not a packed file: give a --recipe to compress it by")
        rules = recipe.rules
        load_weights(net, self.source)
        wanted = max(method.samples for method in (rules.method, *rules.layers.values()))
        calibration = batches if wanted else None
        return compress(
            net, rules.method, layers=rules.layers, exclude=list(rules.exclude), calibration=calibration
        )


def finetune(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A packed file, or a checkpoint to compress by --recipe first."),
    ],
    model: Model,
    data: Data,
    output: Output,
    recipe: Annotated[
        Path | None, typer.Option(help="A TOML file with methods, and settings under \\[finetune].")
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="The original checkpoint: learn its logits and not only the labels.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the images. Default: 5.")] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The initial rate; a cosine takes it to a thousandth. Default: 3e-4."),
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="'train', or 'frozen' for few images. Default: train.")
    ] = None,
    codes: Annotated[
        str | None,
        typer.Option(
            help="'trained', or 'frozen', which keeps them and trains scales, norms and biases: for few images. "
            "Default: trained; frozen after planning."
        ),
    ] = None,
    teacher_share: Annotated[
        float | None, typer.Option(help="With --teacher, how much of the loss is distillation. Default: 1.")
    ] = None,
    mixed_precision: Annotated[str | None, typer.Option(help="no, fp16 or bf16. Default: no.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Train for size too: what one bit per weight costs, in units of the loss. Codes that matter "
            "little become cheaper ones. Try 0.01, then more. Default: 0, which keeps the size about the same."
        ),
    ] = None,
    target_ratio: Annotated[
        float | None,
        typer.Option(
            help="How many times smaller than FP32 the file must be, for example 40. A larger file is planned "
            "anew at that size, from --teacher if given, and trained from there."
        ),
    ] = None,
    shrink_by: Annotated[
        str | None,
        typer.Option(
            help="How a larger file gets to --target-ratio: 'planning', or 'training', which finds the rate on "
            "the way. Training needs a real training set and a few hundred steps. Default: planning."
        ),
    ] = None,
    held_out_share: Annotated[
        float | None,
        typer.Option(
            help="Share of the images, 1,000 at most, to measure on after each epoch: the best state is saved, "
            "or the start if none is better. 0 trains on all. Default: 0.125."
        ),
    ] = None,
    batch_size: BatchSize = 64,
    image_size: ImageSize = 224,
    workers: Workers = 2,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Where the run's state is kept, to resume from. Default: OUTPUT.checkpoint."),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between two saves of it.")] = 500,
    as_json: Json = False,
) -> None:
    """Train a packed model end to end in its packed form, and save it.

    If it is killed, the same command resumes from its checkpoint. Under `accelerate launch` or torchrun the
    same command uses several processes or GPUs.

    Example, the paper's own from a plain checkpoint:

        factorpack finetune resnet18.safetensors --recipe recipes/paper/resnet18-rank128-3bit.toml
        --model torchvision.models:resnet18 --data imagenet -o resnet18.packed.safetensors
    """
    options = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch_norm": batch_norm,
        "codes": codes,
        "teacher_share": teacher_share,
        "mixed_precision": mixed_precision,
        "seed": seed,
        "rate": rate,
        "target_ratio": target_ratio,
        "shrink_by": shrink_by,
        "held_out_share": held_out_share,
    }
    given = {key: value for key, value in options.items() if value is not None}
    state = checkpoint or output.parent / f"{output.name}.checkpoint"
    images = ImageData(data, batch_size, image_size, workers)
    request = FinetuneRequest(source, model, images, output, recipe, teacher, given, state, checkpoint_every)
    tuned = request.run(progress=shows_bar(as_json))
    if tuned is not None:
        _print_result(request, tuned.tuned, as_json)


def _print_result(request: FinetuneRequest, tuned: Tuned | None, as_json: bool) -> None:
    """Size, and accuracy where there is a val folder: both of the file, read back."""
    packed = load(request.output)
    report = packed.size()
    found: Accuracy | None = None
    if request.images.has_validation:
        net = packed.load_into(import_model(request.model)).to(default_device())
        found = measure(net, request.images.validation(), progress=shows_bar(as_json))
    if as_json:
        sizes = {"file_bytes": report.file_bytes, "file_ratio": report.file_ratio}
        accuracy = asdict(found) if found else None
        held_out = asdict(tuned) if tuned else None
        print_json({"path": str(request.output), **sizes, "accuracy": accuracy, "held_out": held_out})
    else:
        text = f", {accuracy_text(found)}" if found else ""
        print_line(f"{request.output}: {report.file_ratio:.2f} times smaller than FP32{text}")
        if tuned is not None and tuned.epoch:  # else a warning has said it
            print_line(str(tuned))
