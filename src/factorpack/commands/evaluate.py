"""`factorpack eval`: `tune.accuracy.evaluate` and `hub.texts.perplexity` in Python."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer
from torch import nn

from factorpack.calibration.model_folder import open_folder
from factorpack.commands.console import print_json, print_line
from factorpack.commands.image_data import ImageData, accuracy_text
from factorpack.commands.options import (
    BatchSize,
    ImageSize,
    Json,
    Key,
    MaxMemory,
    OptionalData,
    OptionalModel,
    Workers,
)
from factorpack.commands.shared_options import shows_bar
from factorpack.errors import PlanError
from factorpack.format.container import is_packed
from factorpack.hub.load import from_pretrained, tokenizer_of
from factorpack.hub.texts import perplexity, windows
from factorpack.model_reference import import_model
from factorpack.packed import load
from factorpack.runtime.apply import MODES, LayerReport, Mode
from factorpack.tune.accuracy import evaluate as measure
from factorpack.tune.models import default_device, load_weights


def evaluate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A packed file, any checkpoint, or a model's folder.", show_default=False
        ),
    ],
    model: OptionalModel = None,
    data: OptionalData = None,
    key: Key = None,
    text: Annotated[
        Path | None,
        typer.Option("--perplexity", help="Or, for a language model's folder: a text file to predict."),
    ] = None,
    length: Annotated[int, typer.Option(help="With --perplexity: tokens per window.")] = 512,
    batch_size: BatchSize = 64,
    image_size: ImageSize = 224,
    workers: Workers = 2,
    mode: Annotated[
        str, typer.Option(help=f"How a packed file runs, one of {', '.join(MODES)}: see packed.apply.")
    ] = "dense",
    max_memory: MaxMemory = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy on an image folder, or perplexity on a text.

    Accuracy is top-1 and top-5. Perplexity is exp of the mean negative log-likelihood per token, over windows
    of the text that do not overlap; the first token of each is given. Compare only results from the same
    windows.

    Examples:

        factorpack eval resnet18.packed.safetensors --model torchvision.models:resnet18 --data imagenet

        factorpack eval small-llama/ --perplexity book.txt
    """
    if text is not None and model is None and data is None:
        _evaluate_text(file, text, length, mode, max_memory, as_json)
    elif text is None and model is not None and data is not None:
        images = ImageData(data, batch_size, image_size, workers)
        _evaluate_images(file, model, images, mode, max_memory, key, as_json)
    else:
        raise PlanError("give --model and --data for images, or --perplexity for a language model's folder")


def _evaluate_images(
    file: Path,
    model: str,
    images: ImageData,
    mode: str,
    max_memory: int | None,
    key: str | None,
    as_json: bool,
) -> None:
    net = import_model(model).to(default_device())
    batches = images.validation()
    if is_packed(file):
        example = next(iter(batches)) if mode == "auto" else None
        layers = load(file).apply(net, cast(Mode, mode), example, max_memory=max_memory).layers
    else:
        layers = _load_plain(file, net, mode, key)
    found = measure(net, batches, progress=shows_bar(as_json))
    if as_json:
        modes = {layer.name: layer.mode for layer in layers}
        print_json({"file": str(file), **asdict(found), "mode": mode, "layers": modes})
        return
    for layer in layers if mode != "dense" else ():
        print_line(str(layer))
    print_line(f"{file}: {accuracy_text(found)}, {found.samples_per_s:.0f} images/s")


def _load_plain(file: Path, net: nn.Module, mode: str, key: str | None) -> tuple[LayerReport, ...]:
    if mode != "dense":
        raise PlanError(f"mode {mode!r} is for packed files, and {file} is none: 'dense' runs it")
    load_weights(net, file, key)
    return ()


def _evaluate_text(
    source: Path, text: Path, length: int, mode: str, max_memory: int | None, as_json: bool
) -> None:
    if mode not in MODES or mode == "auto":
        known = ", ".join(each for each in MODES if each != "auto")
        raise PlanError(f"mode {mode!r}, --perplexity knows {known}")
    folder = open_folder(source)
    found = windows(text, tokenizer_of(folder), length)
    net = from_pretrained(source, cast(Mode, mode), max_memory=max_memory, device_map=str(default_device()))
    measured = perplexity(net, found, progress=shows_bar(as_json))
    if as_json:
        print_json({"file": str(source), **asdict(measured), "length": length, "mode": mode})
    else:
        print_line(
            f"{source}: perplexity {measured.perplexity:.3f} on {measured.tokens} tokens, "
            f"in windows of {length}"
        )
