"""`factorpack decode`: `packed.decode_to` in Python."""

from __future__ import annotations

from factorpack.commands.console import print_json, print_line
from factorpack.commands.options import DecodedBytes, Json, Output, PackedFile
from factorpack.commands.shared_options import shows_bar
from factorpack.format.container import check_ending, check_target
from factorpack.format.overwrite import check_output
from factorpack.packed import load
from factorpack.report.text import human_bytes


def decode(file: PackedFile, output: Output, max_bytes: DecodedBytes = None, as_json: Json = False) -> None:
    """Decode a packed file into an ordinary .safetensors checkpoint.

    Example:

        factorpack decode resnet18.packed.safetensors -o resnet18.safetensors
    """
    check_output(output, file)
    check_target(output)
    check_ending(output)
    load(file, max_bytes).decode_to(output, progress=shows_bar(as_json))
    written = output.stat().st_size
    if as_json:
        print_json({"path": str(output), "bytes": written})
    else:
        print_line(f"{output}: {human_bytes(written)} of plain weights")
