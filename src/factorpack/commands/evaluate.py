"""`factorpack compress` on a model's folder with a text, and `factorpack eval` with its perplexity."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from factorpack.budget.planner import Planner
from factorpack.commands.finetune import (
    BatchSize,
    ImageSize,
    Json,
    Workers,
    console,
    evaluate_pictures,
)
from factorpack.compression import compress
from factorpack.errors import PlanError
from factorpack.hub.folder import open_folder
from factorpack.hub.load import from_pretrained, tokenizer_of
from factorpack.hub.texts import line_batches, perplexity, token_batches, windows
from factorpack.packed import Packed
from factorpack.runtime.apply import MODES
from factorpack.tune.models import device

_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the names of classes end that foretell the next token."""


def compress_on_text(
    source: Path,
    budget: Mapping[str, float | int | None],
    text: Path,
    samples: int,
    length: int,
    exclude: list[str],
    recipe: str | None,
    curves: Path | None,
    progress: bool,
) -> Packed:
    """The model of a folder in a budget, calibrated on a text: on windows of it, or on its lines.

    A model that foretells the next token reads windows without a gap; any other reads each line as one
    text, as its tokenizer wraps it.
    """
    folder = open_folder(source)
    causal = folder.architecture.endswith(_CAUSAL)
    batches = (token_batches if causal else line_batches)(text, tokenizer_of(folder), length, samples)
    chosen = {key: value for key, value in budget.items() if value is not None}
    return compress(
        from_pretrained(source).to(device()),
        exclude=exclude,
        recipe=recipe,
        calibration=batches,
        planner=Planner(samples=samples),
        curves=curves,
        progress=progress,
        **chosen,  # type: ignore[arg-type]
    )


def evaluate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A packed file, any checkpoint, or a model's folder.", show_default=False
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="What makes the model: module:callable, as torchvision.models:resnet18."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder with a folder a class, or with train/ and val/ in it.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--perplexity", help="Or, of a language model's folder: a text file to foretell."),
    ] = None,
    length: Annotated[int, typer.Option(help="With --perplexity: tokens of a window.")] = 512,
    batch_size: BatchSize = 64,
    image_size: ImageSize = 224,
    workers: Workers = 2,
    mode: Annotated[
        str, typer.Option(help=f"How a packed file runs, one of {', '.join(MODES)}: see packed.apply.")
    ] = "dense",
    as_json: Json = False,
) -> None:
    """Measure top-1 and top-5 accuracy on an image folder, or perplexity on a text.

    Perplexity is exp of the mean negative log-likelihood of a token, over windows of the text that do not
    overlap; the first token of each is given. Compare only what was measured with the same windows.

    Examples:

        factorpack eval resnet18.packed.safetensors --model torchvision.models:resnet18 --data imagenet

        factorpack eval small-llama/ --perplexity book.txt
    """
    if text is not None and model is None and data is None:
        _perplexity(file, text, length, mode, as_json)
    elif text is None and model is not None and data is not None:
        evaluate_pictures(file, model, data, (batch_size, image_size, workers), mode, as_json)
    else:
        raise PlanError("give --model and --data for pictures, or --perplexity for a language model's folder")


def _perplexity(source: Path, text: Path, length: int, mode: str, as_json: bool) -> None:
    if mode not in ("dense", "packed", "factored"):
        raise PlanError(f"mode {mode!r}, --perplexity knows dense, packed and factored")
    folder = open_folder(source)
    found = windows(text, tokenizer_of(folder), length)
    net = from_pretrained(source, mode).to(device())  # type: ignore[arg-type]
    measured = perplexity(net, found, progress=not as_json)
    if as_json:
        print(json.dumps({"file": str(source), **asdict(measured), "length": length, "mode": mode}))
    else:
        console.print(
            f"{source}: perplexity {measured.perplexity:.3f} on {measured.tokens} tokens, "
            f"in windows of {length}"
        )
