"""`factorpack compress`: `fp.compress` in Python."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from factorpack.commands.compress_request import CompressRequest, calibration_of
from factorpack.commands.compress_story import conclude, introduce, next_command
from factorpack.commands.console import print_json, print_line, print_note
from factorpack.commands.engines import engine_of
from factorpack.commands.method_options import MethodOptions
from factorpack.commands.options import (
    Bits,
    EngineName,
    EngineWorkers,
    Exclude,
    ImageSize,
    Json,
    Key,
    LatentBits,
    Length,
    MaxBytes,
    MethodName,
    OptionalModel,
    Output,
    Rank,
    Ratio,
    RecipeName,
    Samples,
    Settings,
    Source,
    Sparsity,
    Stream,
)
from factorpack.commands.shared_options import shows_bar
from factorpack.per_tensor import parts_folder
from factorpack.report.text import size_json, size_summary


def compress(
    source: Source,
    output: Output,
    ratio: Ratio = None,
    max_bytes: MaxBytes = None,
    max_loss: Annotated[
        float | None,
        typer.Option(help="Or: the smallest file whose outputs diverge by at most this many nats. Slow."),
    ] = None,
    method: MethodName = None,
    settings: Settings = None,
    rank: Rank = None,
    latent_bits: LatentBits = None,
    sparsity: Sparsity = None,
    bits: Bits = None,
    recipe: RecipeName = None,
    exclude: Exclude = None,
    key: Key = None,
    model: OptionalModel = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="A folder of images, no labels needed, or for a Hugging Face folder a text file: keep the "
            "model's outputs close. Without either, 'synthetic': inputs made from the model itself.",
            show_default=False,
        ),
    ] = None,
    samples: Samples = 256,
    length: Length = 128,
    image_size: ImageSize = 224,
    stream: Stream = False,
    trellis: Annotated[
        int | None,
        typer.Option(
            help="States of a trellis, 4 or 8, along which a budget's codes are chosen where that pays: less loss at "
            "the same size, twice the time to load. 0: none. Without it, 8.",
            show_default=False,
        ),
    ] = None,
    curves: Annotated[
        Path | None, typer.Option(help="Keep rate-distortion curves here (JSON), for this and later budgets.")
    ] = None,
    engine: EngineName = None,
    workers: EngineWorkers = 0,
    as_json: Json = False,
) -> None:
    """Compress a checkpoint into one small, safe file.

    With --ratio or --max-bytes everything is chosen for you, and the file meets the budget: never over it, at
    most 1 % under. That needs no data and no model; with both (--model, --calibration) the same bytes keep
    far more accuracy. A Hugging Face folder has its model in it: --calibration takes a text file then, and
    an output that does not end in .safetensors becomes a folder that opens with fp.hub.from_pretrained, with
    tokenizer, config and a model card. With neither budget nor method a recipe for the model's family is
    followed, if the tensors' names match one. With a method, biases, norms and the first convolution stay
    raw and the classifier gets 4-bit codes. `factorpack plan` shows beforehand what the result would be.

    Without data, --calibration synthetic makes some: for a network with batch norms, images of --image-size that
    give every norm the statistics that it has stored; for a language model, texts of --length tokens that it
    writes itself.

    A model that does not fit the GPU is calibrated with --stream: the weights of one block at a time are on
    it, and in memory. `factorpack plan --stream` shows beforehand how much of both that takes.

    Every setting of a method can be given with --set KEY=VALUE, as often as needed; `factorpack methods` lists
    them with their defaults. --rank, --latent-bits, --sparsity and --bits are short for the usual ones.

    What a budget, or an engine, has finished waits in OUTPUT.parts: if the command is killed, the same command
    resumes from there. With --engine each tensor is a task of its own, and a method's file is the same as
    without. With --engine and --calibration the workers measure sensitivities batch by batch and rate-distortion
    curves weight by weight, each on a GPU of its own where the model is on one; this process then codes the
    layers in order.

    Examples:

        factorpack compress resnet18.safetensors -o small.safetensors --ratio 12

        factorpack compress resnet18.safetensors -o small.safetensors --ratio 20
        --model torchvision.models:resnet18 --calibration images/

        factorpack compress resnet18.safetensors -o small.safetensors --ratio 20
        --model torchvision.models:resnet18 --calibration synthetic

        factorpack compress model.pt -o small.safetensors --rank 128 --latent-bits 3 --set tile=128

        factorpack compress model.pt -o small.safetensors --method rdoq --set qp=-20

        factorpack compress last.ckpt -o small.safetensors --ratio 12 --key state_dict

        factorpack compress folder/ -o small.safetensors --method scalar --bits 4 --exclude 'lm_head.*'

        factorpack compress folder/ -o small-folder --ratio 8 --calibration sentences.txt

        factorpack compress folder/ -o small-folder --ratio 8 --calibration texts.txt --length 2048 --stream

        factorpack compress folder/ -o small.safetensors --method scalar --bits 4 --engine local --workers 8

        factorpack compress folder/ -o small-folder --ratio 8 --calibration sentences.txt --engine ray
    """
    shorthands = {"rank": rank, "latent_bits": latent_bits, "sparsity": sparsity, "bits": bits}
    request = CompressRequest(
        source,
        MethodOptions(method, shorthands, settings or []),
        ratio,
        max_bytes,
        max_loss,
        recipe,
        exclude or [],
        model,
        calibration_of(calibration, length, image_size),
        samples,
        length,
        image_size,
        curves,
        engine_of(engine, workers),
        stream,
        trellis,
        key,
    )
    request.check_outputs(output)
    request.check()
    found = request.open()
    request = request.with_recipe(found, quiet=as_json)
    if not as_json:
        request.advise()
        for line in introduce(request, found):
            print_line(line)
    del found
    _run(request, output, as_json)


def _run(request: CompressRequest, output: Path, as_json: bool) -> None:
    started = time.perf_counter()
    try:
        packed = request.run(output, progress=shows_bar(as_json))
    except KeyboardInterrupt:
        if parts_folder(output).is_dir():
            print_note(f"what is finished is in {parts_folder(output)}: the same command resumes from there")
        raise
    report = packed.size()
    seconds = time.perf_counter() - started
    if as_json:
        found = {"path": str(output), "seconds": seconds, "recipe": request.recipe}
        then = {"estimated_loss": packed.estimated_loss, "next": next_command(request, packed)}
        print_json({**found, **then, **size_json(report)})
        return
    print_line(f"{output}: {size_summary(report)}, in {seconds:.1f} s")
    for line in conclude(request, packed):
        print_line(line)
