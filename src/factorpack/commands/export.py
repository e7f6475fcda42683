"""`factorpack export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from factorpack.commands.finetune import ImageSize, Json, Model
from factorpack.onnx.exporter import export as export_onnx
from factorpack.packed import load
from factorpack.report.text import human_bytes, printable
from factorpack.source import model_from

# One line each, whatever the width, and brackets in a path are no markup.
console = Console(highlight=False, markup=False, soft_wrap=True)


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A packed file.", show_default=False)],
    model: Model,
    onnx: Annotated[Path, typer.Option("--onnx", "-o", help="The .onnx file to write.", show_default=False)],
    opset: Annotated[int, typer.Option(help="ONNX operator set, 18 or above.")] = 21,
    image_size: ImageSize = 224,
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="Leave the number of pictures open instead of one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a small ONNX file that holds the packed codes and rebuilds the weights from them.

    It runs in plain onnxruntime, which rebuilds the weights once, when it loads the file. For models that
    take pictures; others are exported from Python, by fp.onnx.export and an example of their inputs.

    Example:

        factorpack export resnet18.packed.safetensors --model torchvision.models:resnet18 --onnx resnet18.onnx
    """
    packed = load(file)
    pictures = torch.zeros(2 if dynamic_batch else 1, 3, image_size, image_size)
    made = export_onnx(packed, model_from(model), pictures, onnx, opset=opset, dynamic_batch=dynamic_batch)
    original = packed.size().original_bytes
    if as_json:
        found = {"path": str(onnx), "bytes": made.bytes, "original_bytes": original}
        print(json.dumps({**found, "rebuilt": len(made.rebuilt), "absent": list(made.absent)}))
        return
    console.print(
        f"{onnx}: {human_bytes(made.bytes)}, {original / made.bytes:.2f} times smaller than FP32 weights, "
        f"{len(made.rebuilt)} tensors rebuilt by the graph"
    )
    if made.absent:
        console.print(
            f"not packed, since the graph has none of that name: {printable(', '.join(made.absent))}"
        )
