"""Options and arguments that several commands share. This file imports nothing that costs time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = (
    "What makes the model: module:callable, as package.nets:build, or timm:NAME or torchvision:NAME where these "
    "packages are installed."
)
DATA_HELP = "A folder with one folder per class, or with train/ and val/ in it."

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
PackedFile = Annotated[Path, typer.Argument(metavar="FILE", help="A packed file.", show_default=False)]
DecodedBytes = Annotated[
    int | None, typer.Option("--max-bytes", help="Refuse a file that decodes to more bytes than this.")
]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint: .safetensors, a torch file (.pt, .pth, .bin, .ckpt, .pth.tar), .npz, .gguf, a Hugging "
        "Face folder or its index.",
        show_default=False,
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        help="In a torch file with several sets of weights, the name of the one to use, for example state_dict. "
        "Default: an average over training (EMA) if there is one, else the usual name.",
        show_default=False,
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)]
Top = Annotated[int | None, typer.Option(help="Only this many tensors, the largest first.", min=1)]

# A model and its data.
Model = Annotated[str, typer.Option("--model", help=MODEL_HELP, show_default=False)]
OptionalModel = Annotated[str | None, typer.Option("--model", help=MODEL_HELP)]
Data = Annotated[Path, typer.Option("--data", help=DATA_HELP, show_default=False)]
OptionalData = Annotated[Path | None, typer.Option("--data", help=DATA_HELP)]
BatchSize = Annotated[int, typer.Option(help="Images per step.")]
ImageSize = Annotated[int, typer.Option(help="Side of the square images the model takes.")]
Workers = Annotated[int, typer.Option(help="Processes that read images.")]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        help="Bytes that the model may hold in modes packed and auto: weights stay entropy-coded where they must.",
        show_default=False,
    ),
]
Samples = Annotated[
    int, typer.Option(help="Images or texts to calibrate on; more are better, up to about 1,000.")
]
Length = Annotated[int, typer.Option(help="Tokens per text to calibrate on.")]

# What decides what a packed file will be.
Ratio = Annotated[
    float | None,
    typer.Option(help="Make the file this many times smaller than FP32; everything else is chosen for you."),
]
MaxBytes = Annotated[int | None, typer.Option(help="Or: make a file of at most this many bytes.")]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="Or: compress with this method. `factorpack methods` lists all of them with their settings. "
        "Default: qspca.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the method, for example step=0.3 or solver.steps=30. Can be repeated.",
    ),
]
Rank = Annotated[int | None, typer.Option(help="Short for --set rank=...: columns of the codebook (qspca).")]
LatentBits = Annotated[
    int | None, typer.Option(help="Short for --set latent_bits=...: bits per latent code, 2 to 8 (qspca).")
]
Sparsity = Annotated[
    float | None,
    typer.Option(help="Short for --set sparsity=...: share of values set to zero (qspca, prune)."),
]
Bits = Annotated[
    int | None, typer.Option(help="Short for --set bits=...: bits per code (scalar, lsq and others).")
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="A TOML file with a method for each group of layers, a family's name (see `factorpack recipes`), "
        "or 'none'. Default: the family that the tensors' names match.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="Keep tensors of this name raw: a glob, or a regular expression after 're:'."),
]

# Where the work is done.
Stream = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="With --calibration and a Hugging Face folder: read the weights block by block, for a model "
        "larger than the GPU or memory. Sensitivities are from 16 texts, and plans are not refined.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Spread the work: 'local' over processes on this machine, 'ray' over a Ray cluster (or one it "
        "starts here). If it is killed, the same command continues from what is done.",
        show_default=False,
    ),
]
EngineWorkers = Annotated[
    int,
    typer.Option(
        "--workers", help="With --engine: tasks at a time. Default: one per core.", show_default=False
    ),
]
