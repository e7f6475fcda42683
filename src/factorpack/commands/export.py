"""`factorpack export`: `fp.onnx.export` in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from factorpack.commands.console import print_json, print_line
from factorpack.commands.options import ImageSize, Json, Model, PackedFile
from factorpack.model_reference import import_model
from factorpack.onnx.exporter import export as export_onnx
from factorpack.packed import load
from factorpack.report.text import human_bytes


def export(
    file: PackedFile,
    model: Model,
    onnx: Annotated[Path, typer.Option("--onnx", "-o", help="The .onnx file to write.", show_default=False)],
    opset: Annotated[int, typer.Option(help="ONNX operator set, 18 or above.")] = 21,
    image_size: ImageSize = 224,
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch", help="Leave the batch size open instead of fixing it to one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a small ONNX file that rebuilds the weights from the packed codes.

    It runs in plain onnxruntime, which rebuilds the weights once, when it loads the file. This command is for
    models that take images; others are exported from Python with fp.onnx.export and an example of their
    inputs.

    Example:

        factorpack export resnet18.packed.safetensors --model torchvision.models:resnet18 --onnx resnet18.onnx
    """
    packed = load(file)
    images = torch.zeros(2 if dynamic_batch else 1, 3, image_size, image_size)
    made = export_onnx(packed, import_model(model), images, onnx, opset=opset, dynamic_batch=dynamic_batch)
    original = packed.size().original_bytes
    if as_json:
        found = {"path": str(onnx), "bytes": made.bytes, "original_bytes": original}
        print_json({**found, "rebuilt": len(made.rebuilt), "absent": list(made.absent)})
        return
    print_line(
        f"{onnx}: {human_bytes(made.bytes)}, {original / made.bytes:.2f} times smaller than FP32 weights, "
        f"{len(made.rebuilt)} tensors rebuilt by the graph"
    )
    if made.absent:
        print_line(f"not packed, because the graph has no tensor of that name: {', '.join(made.absent)}")
