"""`factorpack finetune`, and `factorpack eval` on pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from torch import nn

from factorpack.budget.planner import Planner
from factorpack.compression import compress
from factorpack.errors import PlanError
from factorpack.format.container import check_target, is_packed
from factorpack.format.locks import locked
from factorpack.format.overwrite import check_output
from factorpack.methods.settings import build_settings
from factorpack.packed import Packed, load, save
from factorpack.planning.families import DEFAULT_METHOD
from factorpack.planning.recipe import Recipe, read_recipe
from factorpack.planning.rules import Rules
from factorpack.runtime.apply import LayerReport, Mode
from factorpack.source import model_from
from factorpack.tune.accuracy import Accuracy
from factorpack.tune.accuracy import evaluate as measure
from factorpack.tune.images import ImageFolder, image_folder, loader, unlabelled
from factorpack.tune.models import device, weights_into
from factorpack.tune.training import Schedule, is_main_process
from factorpack.tune.training import finetune as tune

# One line each, whatever the width, and brackets in a path are no markup.
console = Console(highlight=False, markup=False, soft_wrap=True)

Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="What makes the model: module:callable, as torchvision.models:resnet18.",
        show_default=False,
    ),
]
Data = Annotated[
    Path,
    typer.Option(help="A folder with a folder a class, or with train/ and val/ in it.", show_default=False),
]
Workers = Annotated[int, typer.Option(help="Processes that read pictures.")]
BatchSize = Annotated[int, typer.Option(help="Pictures a step.")]
ImageSize = Annotated[int, typer.Option(help="Side of the square pictures the model takes.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def evaluate_pictures(
    file: Path, model: str, data: Path, reading: tuple[int, int, int], mode: str, as_json: bool
) -> None:
    """`factorpack eval` on an image folder: top-1 and top-5 accuracy."""
    batch_size, image_size, workers = reading
    net = model_from(model).to(device())
    pictures = ImageFolder(image_folder(data, "val"), image_size)
    batches = loader(pictures, batch_size, workers)
    layers: tuple[LayerReport, ...] = ()
    if is_packed(file):
        example = next(iter(batches)) if mode == "auto" else None
        layers = load(file).apply(net, cast(Mode, mode), example).layers
    elif mode == "dense":
        weights_into(net, file)
    else:
        raise PlanError(f"mode {mode!r} is for packed files, and {file} is none: 'dense' runs it")
    found = measure(net, batches, progress=not as_json)
    if as_json:
        ran = {layer.name: layer.mode for layer in layers}
        print(json.dumps({"file": str(file), **asdict(found), "mode": mode, "layers": ran}))
    else:
        for layer in layers if mode != "dense" else ():
            console.print(str(layer))
        console.print(f"{file}: {_words(found)}, {found.samples_per_s:.0f} pictures/s")


def finetune(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A packed file, or a checkpoint to compress by --recipe first."),
    ],
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    recipe: Annotated[
        Path | None, typer.Option(help="A TOML file with methods, and settings under \\[finetune].")
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="The original checkpoint: learn its answers and not only the labels.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the pictures. Default: 5.")] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="The first rate; a cosine takes it to a thousandth. Default: 3e-4."),
    ] = None,
    batch_norm: Annotated[
        str | None, typer.Option(help="'train', or 'frozen' for few pictures. Default: train.")
    ] = None,
    teacher_share: Annotated[
        float | None, typer.Option(help="With --teacher, how much of the loss is distillation. Default: 1.")
    ] = None,
    mixed_precision: Annotated[str | None, typer.Option(help="no, fp16 or bf16. Default: no.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Train for size too: what a bit a weight costs, in units of the loss. Codes that matter "
            "little become cheaper ones. Try 0.01, then more. Default: 0, the size stays about what it is."
        ),
    ] = None,
    target_ratio: Annotated[
        float | None,
        typer.Option(
            help="Or say how many times smaller than FP32 the file shall be, as 60: the rate is found on "
            "the way, and the file is never larger. Give it some hundred steps."
        ),
    ] = None,
    batch_size: BatchSize = 64,
    image_size: ImageSize = 224,
    workers: Workers = 2,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Where the run's state is kept, so that it can go on. Default: OUTPUT.checkpoint."),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between two saves of it.")] = 500,
    as_json: Json = False,
) -> None:
    """Train a packed model end to end in its packed form, and save it.

    Killed, it goes on from its checkpoint when it is started again. Under `accelerate launch` or torchrun
    the same command uses several processes or GPUs.

    Example, the paper's own from a plain checkpoint:

        factorpack finetune resnet18.safetensors --recipe recipes/paper/resnet18-rank128-3bit.toml
        --model torchvision.models:resnet18 --data imagenet -o resnet18.packed.safetensors
    """
    stated = read_recipe(recipe, DEFAULT_METHOD) if recipe is not None else None
    options = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch_norm": batch_norm,
        "teacher_share": teacher_share,
        "mixed_precision": mixed_precision,
        "seed": seed,
        "rate": rate,
        "target_ratio": target_ratio,
    }
    given = {key: value for key, value in options.items() if value is not None}
    state = checkpoint or output.with_name(f"{output.name}.checkpoint")
    for target in (output, state):
        check_target(target)
        check_output(target, source, teacher, recipe, data)
    check_output(output, state)
    schedule: Schedule = build_settings(
        Schedule, {**(stated.finetune if stated else {}), **given}, "fine-tuning"
    )
    net = model_from(model).to(device())
    pictures = ImageFolder(image_folder(data, "train"), image_size, augment=True)
    batches = loader(pictures, batch_size, workers, shuffle=True)
    original = weights_into(model_from(model), teacher).to(device()) if teacher is not None else None
    torch.manual_seed(schedule.seed)
    packed = _packed(source, stated, net, batches)
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes of one run
    with locked(state) if speaks else nullcontext():
        tune(
            packed,
            net,
            batches,
            teacher=original,
            schedule=schedule,
            checkpoint=state,
            checkpoint_every=checkpoint_every,
            progress=not as_json,
        )
        if not is_main_process():
            return
        save(packed, output)
        state.unlink(missing_ok=True)
    _tell(output, model, data, (batch_size, image_size, workers), as_json)


def compress_into_budget(
    source: Path,
    budget: Mapping[str, float | int | None],
    model: str | None,
    calibration: Path | None,
    samples: int,
    image_size: int,
    exclude: list[str],
    recipe: str | None,
    curves: Path | None,
    progress: bool,
) -> Packed:
    """`factorpack compress` with a budget: from the weights alone, or from a model and unlabelled pictures."""
    if calibration is not None and model is None:
        raise PlanError(
            "--calibration runs the model on pictures: say what makes it with --model module:callable"
        )
    given: Path | nn.Module = source
    batches = None
    if model is not None:
        given = weights_into(model_from(model), source).to(device())
    if calibration is not None:
        batches = unlabelled(calibration, samples, image_size)
    chosen = {key: value for key, value in budget.items() if value is not None}
    return compress(
        given,
        exclude=exclude,
        recipe=recipe,
        calibration=batches,
        planner=Planner(samples=samples),
        curves=curves,
        progress=progress,
        **chosen,  # type: ignore[arg-type]
    )


def _tell(output: Path, model: str, data: Path, reading: tuple[int, int, int], as_json: bool) -> None:
    """Size, and accuracy where there is a val folder: both of the file, read back."""
    packed = load(output)
    report = packed.size()
    batch_size, image_size, workers = reading
    found: Accuracy | None = None
    if (data / "val").is_dir():
        net = packed.load_into(model_from(model)).to(device())
        pictures = ImageFolder(data / "val", image_size)
        found = measure(net, loader(pictures, batch_size, workers), progress=not as_json)
    if as_json:
        sizes = {"file_bytes": report.file_bytes, "file_ratio": report.file_ratio}
        print(json.dumps({"path": str(output), **sizes, "accuracy": asdict(found) if found else None}))
    else:
        words = f", {_words(found)}" if found else ""
        console.print(f"{output}: {report.file_ratio:.2f} times smaller than FP32{words}")


def _packed(source: Path, recipe: Recipe | None, net: nn.Module, batches: Any) -> Packed:
    """The packed file itself, or a checkpoint compressed by the recipe, calibrated on training pictures."""
    if is_packed(source):
        return load(source)
    if recipe is None:
        raise PlanError(f"{source} is not a packed file: give a --recipe to compress it by")
    rules: Rules = recipe.rules
    weights_into(net, source)
    wanted = max(method.samples for method in (rules.method, *rules.layers.values()))
    calibration = batches if wanted else None
    return compress(
        net, rules.method, layers=rules.layers, exclude=list(rules.exclude), calibration=calibration
    )


def _words(accuracy: Accuracy) -> str:
    return f"top-1 {accuracy.top1:.2%}, top-5 {accuracy.top5:.2%} of {accuracy.samples} pictures"
