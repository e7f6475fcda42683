"""`factorpack export`: `fp.onnx.export`, `fp.gguf.export` and `packed.decode_to` in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from factorpack.calibration.model_folder import CONFIG, is_model_folder, open_folder
from factorpack.commands.console import print_json, print_line
from factorpack.commands.options import ImageSize, Json, OptionalModel
from factorpack.commands.shared_options import shows_bar
from factorpack.errors import PlanError, SourceError
from factorpack.format.container import check_ending
from factorpack.format.overwrite import check_output
from factorpack.gguf.write_gguf import PLAIN, TYPES
from factorpack.gguf.write_gguf import export as export_gguf
from factorpack.model_reference import import_model
from factorpack.onnx.exporter import export as export_onnx
from factorpack.packed import Packed, load
from factorpack.report.text import human_bytes


def export(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A packed file, or a packed folder.", show_default=False)
    ],
    onnx: Annotated[
        Path | None, typer.Option("--onnx", "-o", help="The .onnx file to write.", show_default=False)
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="Or: the .gguf file to write, of a Llama, Mistral or Qwen2.")
    ] = None,
    safetensors: Annotated[
        Path | None, typer.Option(help="Or: the .safetensors file to write, of plain weights.")
    ] = None,
    model: OptionalModel = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="With --gguf: the Hugging Face folder whose config and tokenizer it gets. Default: FILE's."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"With --safetensors: {', '.join(PLAIN)}. With --gguf, for matrices: also "
            f"{', '.join(TYPES[len(PLAIN) :])}. Default: the types the weights had.",
            show_default=False,
        ),
    ] = None,
    no_tokenizer: Annotated[
        bool, typer.Option("--no-tokenizer", help="With --gguf: leave the tokenizer out.")
    ] = False,
    opset: Annotated[int, typer.Option(help="With --onnx: the operator set, 18 or above.")] = 21,
    image_size: ImageSize = 224,
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="Leave the batch size open instead of fixing it to one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a packed file for other programs: ONNX, GGUF, or safetensors in 16 bits.

    An ONNX file rebuilds the weights from the packed codes. It is small, and runs in plain onnxruntime, which
    rebuilds the weights once, when it loads the file. This command is for models that take images; others are
    exported from Python with fp.onnx.export and an example of their inputs.

    A GGUF file is for llama.cpp. It holds plain weights in a type of llama.cpp's, and the config and tokenizer of
    the model's folder. A safetensors file holds plain weights.

    Examples:

        factorpack export resnet18.packed.safetensors --model torchvision:resnet18 --onnx resnet18.onnx

        factorpack export small-llama/ --gguf small-llama.gguf --dtype q8_0

        factorpack export small.safetensors --like llama/ --gguf small-llama.gguf

        factorpack export resnet18.packed.safetensors --safetensors resnet18.safetensors --dtype bf16
    """
    if sum(target is not None for target in (onnx, gguf, safetensors)) != 1:
        raise PlanError("give one of --onnx, --gguf and --safetensors, with the file to write")
    if gguf is None and (like is not None or no_tokenizer):
        raise PlanError("--like and --no-tokenizer are for --gguf")
    packed = load(_packed_file(file))
    if onnx is not None:
        if dtype is not None:
            raise PlanError(
                "--dtype is for --gguf and --safetensors: an ONNX file has the types of its graph"
            )
        images = torch.zeros(2 if dynamic_batch else 1, 3, image_size, image_size)
        _export_onnx(packed, model, images, onnx, opset, dynamic_batch, as_json)
    elif gguf is not None:
        _export_gguf(packed, gguf, like or _folder_of(file), dtype, not no_tokenizer, as_json)
    elif safetensors is not None:
        _export_safetensors(packed, safetensors, dtype, as_json)


def _packed_file(path: Path) -> Path:
    """The packed file itself, or that of a folder."""
    if not path.is_dir():
        return path
    found = open_folder(path).packed_file
    if found is None:
        raise SourceError(f"{path} is a folder of plain weights, expected a packed file or a packed folder")
    return found


def _folder_of(path: Path) -> Path:
    """The model's folder where a packed file lies in it."""
    folder = path if path.is_dir() else path.absolute().parent
    if is_model_folder(folder):
        named = open_folder(folder).packed_file
        if path.is_dir() or (named is not None and named.samefile(path)):
            return folder
    raise PlanError(
        f"a GGUF file says what model it is, and {path} is in no packed folder with a {CONFIG}: name the model's "
        "Hugging Face folder with --like"
    )


def _export_onnx(
    packed: Packed,
    model: str | None,
    images: torch.Tensor,
    path: Path,
    opset: int,
    dynamic_batch: bool,
    as_json: bool,
) -> None:
    if model is None:
        raise PlanError(
            "an ONNX file is the graph of a model: say what makes it with --model module:callable"
        )
    made = export_onnx(packed, import_model(model), images, path, opset=opset, dynamic_batch=dynamic_batch)
    original = packed.size().original_bytes
    if as_json:
        found = {"path": str(path), "bytes": made.bytes, "original_bytes": original}
        print_json({**found, "rebuilt": len(made.rebuilt), "absent": list(made.absent)})
        return
    print_line(
        f"{path}: {human_bytes(made.bytes)}, {original / made.bytes:.2f} times smaller than FP32 weights, "
        f"{len(made.rebuilt)} tensors rebuilt by the graph"
    )
    if made.absent:
        print_line(f"not packed, because the graph has no tensor of that name: {', '.join(made.absent)}")


def _export_gguf(
    packed: Packed, path: Path, like: Path, dtype: str | None, tokenizer: bool, as_json: bool
) -> None:
    made = export_gguf(packed, path, like, dtype=dtype, tokenizer=tokenizer)
    if as_json:
        print_json({"path": str(path), "bytes": made.bytes, "types": dict(made.types)})
        return
    types = ", ".join(f"{count} {name}" for name, count in made.types.items())
    print_line(f"{path}: {human_bytes(made.bytes)}, {types} tensors")
    if not tokenizer:
        print_line("without a tokenizer: llama.cpp runs it on numbers of tokens, and not on texts")


def _export_safetensors(packed: Packed, path: Path, dtype: str | None, as_json: bool) -> None:
    if dtype is not None and dtype not in PLAIN:
        raise PlanError(f"--dtype is {dtype!r}, a safetensors file takes {', '.join(PLAIN)}")
    check_output(path, packed.path)
    check_ending(path)
    packed.decode_to(path, progress=shows_bar(as_json), dtype=None if dtype is None else PLAIN[dtype])
    written = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "bytes": written})
    else:
        print_line(f"{path}: {human_bytes(written)} of plain weights")
